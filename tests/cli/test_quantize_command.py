"""`qtoolkit quantize`: a model and batches of a Python file become a file that the other commands take."""

import json
import re
import sys
from pathlib import Path

import pytest

from qtoolkit.cli import main

PROGRAM = """
import torch
from torch import nn

print("imported")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4), nn.Softmax(1))


def batches():
    for _ in range(3):
        yield torch.rand(4, 3, 8, 8)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


net = Net()
rows = [torch.rand(2, 4)]
wrong = [torch.rand(2, 5)]
number = 5


class Bad(nn.Module):
    def forward(self, x):
        return {}[x]


def fails():
    return undefined_name


def stops():
    raise SystemExit(3)


def fail_in_batches():
    yield torch.rand(2, 4)
    raise KeyError("row 7")
"""


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """The file, in the working folder, under a name that no other test imports."""
    file = tmp_path / f"program_of_{tmp_path.name}.py"
    file.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield file
    sys.modules.pop(file.stem, None)


def typed(program: Path, model: str, data: str, *more: str, backend: str = "onnxruntime") -> list[str]:
    options = ["--backend", backend, "--exporter", "torchscript"]
    return ["quantize", f"{program}:{model}", "--data", f"{program}:{data}", *options, *more]


def test_a_file_s_model_becomes_a_file(program: Path, capsys) -> None:
    assert main(typed(program, "model", "batches")) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert all(line.startswith(("model.onnx: ", "model.onnx\t")) for line in lines)
    assert "model.onnx: verdict: equal" in lines
    assert [line for line in lines if line.endswith(" ranges from 3 batches of data")]
    assert [line.split("\t")[1:3] for line in lines if "\t" in line] == [["4", "softmax"]]
    assert "imported" in err, "what the user's file prints is no part of the answer"
    assert main(["lint", "model.onnx", "--backend", "onnxruntime"]) == 0


@pytest.mark.parametrize("model", ["net", "Net"])
def test_a_module_by_its_name_and_json(program: Path, model: str, capsys) -> None:
    name = program.stem
    argv = ["quantize", f"{name}:{model}", "--data", f"{name}:rows", "--backend", "onnxruntime"]
    assert main([*argv, "--out", "deep/net.onnx", "--exporter", "torchscript", "--constant-batch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "file",
        "backend",
        "bytes",
        "opset",
        "layers",
        "ranges",
        "codes",
        "in_float",
        "verdict",
        "notes",
    ]
    assert (found["file"], found["verdict"], found["notes"]) == ("deep/net.onnx", "equal", [])
    assert Path("deep/net.onnx").stat().st_size == found["bytes"]
    assert [count["differing"] for count in found["codes"].values()] == [0, 0, 0, 0]


def test_options_reach_the_call(program: Path, capsys) -> None:
    options = ["--max-batches", "2", "--method", "mse", "--exclude", "3", "--json"]
    assert main(typed(program, "model", "batches", *options)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranges"]["batches"] == 2
    assert {each["layer"]: each["status"] for each in found["layers"]}["3"] == "float"


def test_a_target_without_a_runtime_has_no_verdict(program: Path, capsys) -> None:
    assert main(typed(program, "model", "batches", backend="tensorrt10")) == 0
    out = capsys.readouterr().out
    assert "model.onnx: verdict: none" in out
    assert "no runtime of the backend 'tensorrt10'" in out


def test_a_file_in_float16_has_one_and_a_note_on_what_ran(program: Path, capsys) -> None:
    assert main(typed(program, "model", "batches", backend="tensorrt")) == 0
    out = capsys.readouterr().out
    assert re.search("model.onnx: verdict: (equal|rounding of float16)\n", out)
    assert "onnxruntime's CPU backend has no integer kernels for float16 Q/DQ pairs" in out


def test_what_users_of_the_runtime_must_know_is_a_note(program: Path, monkeypatch, capsys) -> None:
    from qtoolkit.export.verification.runtimes import onnxruntime_cpu

    monkeypatch.setattr(onnxruntime_cpu, "OF_FLOATS", "QGemm")  # a kernel that rounds its float inputs
    assert main(typed(program, "model", "batches", "--json")) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "rounds the float inputs" in note
    assert main(typed(program, "model", "batches")) == 0
    assert "model.onnx: onnxruntime rounds the float inputs" in capsys.readouterr().out


def test_a_file_that_saturates_is_exit_code_1(program: Path, monkeypatch, capsys) -> None:
    from qtoolkit.export.verification.runtimes import onnxruntime_cpu

    monkeypatch.setattr(onnxruntime_cpu, "processor_saturates", lambda: True)
    monkeypatch.setattr(onnxruntime_cpu, "saturating_nodes", lambda optimized, types: optimized.proto.graph.node[:1])
    with pytest.warns(UserWarning, match="saturate at 16 bits on this processor"):
        assert main(typed(program, "model", "batches", "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "saturates on this processor"
    assert any("weight_codes='uint8'" in note for note in found["notes"])


def test_codes_that_differ_are_exit_code_1(program: Path, monkeypatch, capsys) -> None:
    from qtoolkit.export import Verdict
    from qtoolkit.export.verification.deployed import RuntimeCodes

    monkeypatch.setattr(RuntimeCodes, "verdict", Verdict.DIFFERENT)
    monkeypatch.setattr(RuntimeCodes, "_cause", lambda self: "sums saturate.")
    with pytest.warns(UserWarning, match="sums saturate"):
        assert main(typed(program, "model", "batches")) == 1


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("modell", "batches", "model: unknown name in '{file}': 'modell'; did you mean 'model'?"),
        ("model", "number", "batches must be an iterable of batches, such as a list, got int"),
        ("number", "batches", "model must be a torch.nn.Module, got int"),
        ("net", "wrong", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_bad_names_are_a_sentence(program: Path, model: str, data: str, words: str, capsys) -> None:
    assert main(typed(program, model, data)) == 2
    out, err = capsys.readouterr()
    (said,) = [line for line in err.splitlines() if line.startswith("qtoolkit: ")]
    assert words.format(file=program) in said
    assert "Traceback" not in err
    assert out == ""
    assert not Path("model.onnx").exists()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("model", "model: 'model' must be MODULE:NAME or path/file.py:NAME."),
        ("none.py:model", "model: 'none.py' does not exist."),
        ("no_such_module:model", "model: 'no_such_module': no module 'no_such_module' is in "),
        ("json.py:model", "model: 'json.py' has the name of a module that is already imported"),
    ],
)
def test_bad_references_are_a_sentence(program: Path, reference: str, words: str, capsys) -> None:
    Path("json.py").write_text("model = 5\n")
    assert main(["quantize", reference, "--data", f"{program}:rows", "--backend", "onnxruntime"]) == 2
    assert capsys.readouterr().err.startswith(f"qtoolkit: {words}")


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("fails", "rows", "raised NameError: name 'undefined_name' is not defined."),
        ("stops", "rows", "raised SystemExit: 3."),
        ("net", "fail_in_batches", "KeyError: 'row 7'"),
        ("Bad", "rows", "KeyError"),
    ],
)
def test_errors_of_the_user_s_code_come_with_their_place(program: Path, model: str, data: str, words, capsys) -> None:
    assert main(typed(program, model, data)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert f'File "{program}"' in err
    assert not Path("model.onnx").exists()
