"""The notebooks of docs/tutorials: they run, print and draw what is kept in them, and reach what their words say."""

import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from tests.sweep import slow_but

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which is not installed")
pytest.importorskip("matplotlib", reason="needs matplotlib, which is not installed")

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = DOCS / "tutorials"
EQUAL = "result.verification.weight_codes.differing == result.verification.quantizer_codes.differing == 0"
CLAIMS = {
    "classification": (
        "deployed.check()",
        "float_accuracy > 95",
        "trained_accuracy > max(calibrated_accuracy + 2, float_accuracy - 4)",
        EQUAL,
    ),
    "detector": (
        "'model.network = qtoolkit.prepare(model.network, backend=...)' in message",
        "float_score > 80",
        "calibrated_score > float_score - 3",
        "trained_score > float_score - 5",
        "f_score(converted) == calibrated_score",
        EQUAL,
    ),
    "no_tracing": (
        "(untraced, own) == ('sharpen', '')",
        "float_accuracy > 93",
        "trained_accuracy > float_accuracy - 2",
        "accuracy(converted) == trained_accuracy",
        EQUAL,
    ),
    "own_quantizer": (
        "'grad_factor' in sentence",
        "(prepared.conv1.weight_quantizer.scale != start).any()",
        "(prepared.conv1.weight_quantizer.scale > 0).all()",
        "trained_accuracy > max(calibrated_accuracy, float_accuracy - 4)",
        "[quantized_inputs_of_add(backend) for backend in (chip, 'tensorrt', both)] == [2, 1, 2]",
        "accuracy(again.eval()) == trained_accuracy",
        EQUAL,
    ),
    "super_resolution": (
        "prepared.deconv.weight_quantizer.spec.axis == 1",
        "float_psnr > bicubic",
        "calibrated_psnr > float_psnr - 0.3",
        "trained_psnr > float_psnr - 0.2",
        EQUAL,
    ),
    "transformer": (
        "float_accuracy > 93",
        "worst_after > worst_before + 6",
        "smooth_accuracy > float_accuracy - 1",
        "gptq_accuracy > float_accuracy - 4",
        "trained_accuracy > max(before_training + 5, float_accuracy - 4)",
        EQUAL,
    ),
}


# What processors with and without int8 instructions say of a layer's training.
KERNELS = re.compile(r"int8 kernel \(float for fewer than [\d,]+ positions\)|float \(no int8 kernel\)")


def lines_of(cell: Any) -> list[str]:
    """Return what a cell prints without its numbers, which processors and versions change, in any order; and what it draws."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    printed = KERNELS.sub("its kernel", "".join(texts))
    lines = [re.sub(r"-?[\d.,]*\d[\d.,]*(e[-+]\d+)?|\binf\b|\bnan\b", "#", line) for line in printed.splitlines()]
    pictures = ["picture" for output in cell.outputs if "image/png" in output.get("data", {})]
    return sorted(" ".join(line.replace("-", " ").split()) for line in lines) + pictures


@pytest.mark.slow
@pytest.mark.parametrize("notebook", slow_but(sorted(path.stem for path in TUTORIALS.glob("*.ipynb")), "own_quantizer"))
def test_a_notebook_runs_and_has_the_outputs_of_its_code(notebook: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    path = TUTORIALS / f"{notebook}.ipynb"
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    assert kept.metadata.kernelspec.name == "python3"
    fresh, names = run_path(str(DOCS / "notebooks.py"))["executed"](path)
    for claim in CLAIMS[notebook]:
        assert eval(claim, names), claim
    code = [(old, new) for old, new in zip(kept.cells, fresh.cells, strict=True) if new.cell_type == "code"]
    assert [lines_of(old) for old, _ in code] == [lines_of(new) for _, new in code], "run python docs/notebooks.py"
    assert any("picture" in lines_of(old) for old, _ in code)
    assert not any(re.search(r"^assert\b", old.source, re.MULTILINE) for old, _ in code)
