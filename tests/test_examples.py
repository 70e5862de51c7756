"""The examples, run as a user would, and their figures on real weights and images."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import DATA, needs_data

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_digits(tmp_path) -> None:
    out = run_example("digits.py", "--epochs", "12", "--qat-epochs", "4", "--out", str(tmp_path / "model.onnx"))
    assert (tmp_path / "model.onnx").exists()
    assert (tmp_path / "model_w4a4.onnx").exists()
    for bits in ("W8A8", "W4A4"):
        row = next(line for line in out.splitlines() if bits in line)
        float_accuracy, _, qat, runtime, *_ = (float(f) for f in re.findall(r"[\d.]+", row.replace(bits, "")))
        assert float_accuracy > 95
        assert qat > float_accuracy - 2
        assert abs(runtime - qat) < 1


@needs_data
@pytest.mark.data
def test_cifar10_resnet20_codes_and_accuracy(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar10_resnet20

    result = cifar10_resnet20.run(DATA, "onnxruntime", tmp_path / "resnet20.onnx")
    codes = result.verification
    assert result.float_accuracy == pytest.approx(91.5, abs=0.051)
    assert result.ptq_accuracy >= result.float_accuracy - 0.301
    assert abs(result.runtime_accuracy - result.ptq_accuracy) <= 0.101
    assert result.same_class >= 99.5
    assert codes.weight_codes.compared == 268_336
    assert codes.weight_codes.differing == 0
    assert codes.quantizer_codes.compared > 270_000_000
    assert codes.quantizer_codes.differing == 0
    assert codes.layer_codes.share < 1e-5
    assert codes.layer_codes.steps <= 1
