"""What makes the table of docs/tensorrt.md, on a stand-in of TensorRT (tests/tensorrt_stand_in.py): that needs a GPU."""

import inspect
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import processes

pytest.importorskip("onnxruntime")

from benchmarks.pages import tensorrt as page
from benchmarks.pages.gpu_networks import Network
from benchmarks.pages.tensorrt_engine import DTYPES, Engine, Layer
from tests import tensorrt_stand_in

RUN = {"card": "a card", "tensorrt": "11.4", "torch": "2.14", "commit": "1", "network": "ResNet-50", "batch": 8}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_stand_in.module())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network of two layers, under the name of the first one."""

    def build(size: int, most: int) -> nn.Module:
        body = (nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 29 * 29, 10))
        return nn.Sequential(*body)

    monkeypatch.setitem(page.ENGINES, "ResNet-50", Network(build))
    return page.ENGINES["ResNet-50"]


def run_page(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run the command with a page and results in a folder; return its rows."""
    written = folder / "page.md"
    written.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(page, "OUT", folder / "tensorrt.json")
    monkeypatch.setattr(sys, "argv", ["tensorrt", *options])
    page.main()
    return json.loads((folder / "tensorrt.json").read_text())["rows"]


@pytest.mark.slow
def test_engines_of_all_files_are_measured_and_compared_with_pytorch(
    stand_in: None, small: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--quick", "--batch", "2", "--networks", "ResNet-50", "--write")
    rows = {row["file"]: row for row in run_page(monkeypatch, tmp_path, *options)}
    assert [row.get("failed") for row in rows.values()] == [None] * len(rows)
    assert rows["float16"]["of_float16"] == 1
    assert set(rows["float16"]["layers"]) == {"float16"}
    assert rows["int8, float16 file"]["layers"] == {"int8": 4, "float16": 1}  # a ReLU between a layer and its quantizer
    assert rows["int8, float32 file"]["layers"] == {"int8": 4, "float32": 1}
    for name, references in {"int8, float16 file": ["float16", "float32"], "int8, float32 file": ["float32"]}.items():
        assert list(rows[name]["codes"]) == references
        for codes in rows[name]["codes"].values():
            compared, differing, steps = codes["layer_by_layer"]
            assert compared == 2 * (3 * 64 * 64 + 8 * 31 * 31 + 8 * 29 * 29)
            assert differing <= compared * (1e-2 if name == "int8, float16 file" else 1e-4)  # a float16 has 11 bits
            assert (steps <= 1, len(codes["by_quantizer"]), codes["not_compared"]) == (True, 3, [])
            assert codes["changed_by_reading"] == 0
        assert 0 < rows[name]["output_error"] < 0.1
    assert 0 < rows["float16"]["output_error"] < 0.01
    text = (tmp_path / "page.md").read_text()
    assert "\n\nMeasured on one the processor with TensorRT 11.4 (a stand-in), torch " in text
    assert (text.startswith("before\n"), text.endswith(f"{page.END}\nafter\n"), "old" in text) == (True, True, False)
    assert "| ResNet-50 | 2 | int8, float16 file | " in text
    assert "of float16's; layers: 4 int8, 1 float16; " in capsys.readouterr().out


def test_a_quantizer_that_computes_something_else_is_named(stand_in: None, small: Network, tmp_path: Path) -> None:
    case = page.Case.of(small, 2, quick=True)
    page.write_quantized(case, tmp_path / "model.onnx")
    engine = Engine(tmp_path / "model.onnx", "cpu")
    same = page.compared(engine, tmp_path / "model.onnx", case, ["float32"], "cpu")["float32"]
    assert same.layer_codes.share < 1e-2
    name = list(same.by_quantizer)[1]
    case.converted.get_submodule(name).scale.mul_(2)
    other = page.compared(engine, tmp_path / "model.onnx", case, ["float32"], "cpu")["float32"]
    layers = other.layer_by_layer or {}
    assert next(each for each, count in layers.items() if count.share > 0.1) == name


def test_a_file_without_an_engine_is_a_row_and_a_line_of_the_page(
    stand_in: None, small: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Singular(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(x.float())

    monkeypatch.setattr(page, "Float16", lambda model: Singular())
    options = ("--device", "cpu", "--quick", "--batch", "2", "--networks", "ResNet-50", "--files", "float16", "--write")
    (row,) = run_page(monkeypatch, tmp_path, *options)
    assert row["failed"] == "TensorRT builds no engine of the file; its messages on the console say why"
    assert f"- No engine: ResNet-50, float16: {row['failed']}." in (tmp_path / "page.md").read_text().splitlines()


def test_times_hold_without_a_comparison(
    stand_in: None, small: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("no int8 outputs")

    monkeypatch.setattr(page, "executed", refused)
    options = ("--device", "cpu", "--quick", "--batch", "2", "--networks", "ResNet-50")
    _, row = run_page(monkeypatch, tmp_path, *options, "--files", "int8, float16 file", "--write")
    assert (row["codes"], row["not_compared"], row["milliseconds"] > 0) == ({}, "no int8 outputs", True)
    line = "- Values not compared: ResNet-50, int8, float16 file: no int8 outputs."
    assert line in (tmp_path / "page.md").read_text().splitlines()


def test_rows_of_another_machine_replace_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"float32": {"end_to_end": [1000, 20, 2], "layer_by_layer": [1000, 1, 1]}}
    layers = {"int8": 50, "float16": 3, "other": 2}
    figures = {
        "milliseconds": 2.0,
        "of_float16": 0.5,
        "layers": layers,
        "conversions": 1,
        "output_error": 0.01,
        "codes": codes,
    }
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    rows = [{**RUN, "file": "int8, float16 file", "failed": "why"}, {**RUN, "file": "float16", "failed": "why"}]
    first.write_text(json.dumps({"rows": rows}))
    second.write_text(json.dumps({"rows": [{**RUN, "file": "int8, float16 file", **figures}]}))
    run_page(monkeypatch, tmp_path, str(first))
    rows = run_page(monkeypatch, tmp_path, str(second))
    assert [(row["file"], "failed" in row) for row in rows] == [("float16", True), ("int8, float16 file", False)]
    line = (
        "| ResNet-50 | 8 | int8, float16 file | 2.000 | 0.50 | 50 | 3 | 0 | 2 | 1 | 1.0e-02 | - | - | 2.00% | 0.10% |"
    )
    assert line in (tmp_path / "page.md").read_text().splitlines()


def test_without_a_gpu_and_the_package_nothing_is_written_and_a_sentence_says_why() -> None:
    before = page.PAGE.read_text()
    run = processes.python("-m", "benchmarks.pages.tensorrt", "--write")
    if torch.cuda.is_available() and find_spec("tensorrt"):
        pytest.skip("there is an engine here")
    assert run.returncode == 1
    assert run.stderr.startswith("No engine was built, and nothing was written. ")
    assert ("There is no GPU that this torch can use." in run.stderr) == (not torch.cuda.is_available())
    assert ("pip install tensorrt." in run.stderr) == (find_spec("tensorrt") is None)
    assert page.PAGE.read_text() == before


def test_an_older_tensorrt_is_refused(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "10.13.2")
    monkeypatch.setattr(sys, "argv", ["tensorrt", "--device", "cpu"])
    with pytest.raises(SystemExit, match="tensorrt is 10.13.2, and 11 or newer is needed"):
        page.main()


def test_the_page_has_the_rows_of_the_results() -> None:
    rows = json.loads(page.OUT.read_text())["rows"] if page.OUT.exists() else []
    part = page.PAGE.read_text().split(page.BEGIN)[1].split(page.END)[0]
    assert part.strip("\n").splitlines() == [*page.table(rows)][1:-1]


@pytest.mark.parametrize(
    ("facts", "precision", "converts"),
    [
        ({"LayerType": "CaskConvolution", "Inputs": [{"Datatype": "Int8", "Format": "Row major"}]}, "int8", False),
        ({"LayerType": "kgen", "Inputs": [{"DataType": "Half"}, {"DataType": "Float"}]}, "float32", False),
        ({"LayerType": "gemm", "Inputs": [{"Format/Datatype": "Channel major FP16 format"}]}, "float16", False),
        ({"LayerType": "Reformat", "Inputs": [{"Format/Datatype": "Row major linear FP32"}]}, "float32", True),
        ({"LayerType": "kgen", "Inputs": [{"Datatype": "BFloat16"}]}, "bfloat16", False),
        ({"LayerType": "kgen", "Inputs": [{"Format/Datatype": "N/A due to dynamic shapes"}]}, "other", False),
        ({"LayerType": "kgen", "Inputs": [], "Outputs": [{"Datatype": "Half"}]}, "float16", False),
        ({}, "other", False),
    ],
)  # fmt: skip
def test_the_type_of_a_layer_is_read(facts: dict[str, Any], precision: str, converts: bool) -> None:
    layer = Layer.of({"Name": "layer", **facts})
    assert (layer.precision, layer.converts) == (precision, converts)


def test_the_stand_in_has_the_names_and_arguments_of_the_package() -> None:
    """Of tensorrt's Python bindings: the first lines of the docstrings that pybind11 writes."""
    real = pytest.importorskip("tensorrt", reason="needs tensorrt, which is not installed")
    for kind in tensorrt_stand_in.CLASSES:
        own = {name: ours for name, ours in vars(kind).items() if not name.startswith("_")}
        for name, ours in own.items():
            theirs = getattr(getattr(real, kind.__name__), name)
            lines = re.findall(rf"^(?:\d\. )?{name}\((.*)\) ->", theirs.__doc__ or "", re.MULTILINE)
            taken = [set(re.findall(r"(\w+): ", line)) for line in lines]
            needed = set(inspect.signature(ours).parameters) if inspect.isfunction(ours) else set()
            assert not needed or any(needed <= arguments for arguments in taken), f"{kind.__name__}.{name}: {lines}"
    for name in ("DataType", "ProfilingVerbosity", "LayerInformationFormat"):
        members = set(getattr(real, name).__members__)
        assert {*getattr(tensorrt_stand_in, name).__members__, *(DTYPES if name == "DataType" else ())} <= members
    assert {"FP16", "INT8"}.isdisjoint(real.BuilderFlag.__members__)
