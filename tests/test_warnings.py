"""Every warning names the user's line, however many frames of the package, of torch and of generated code are between."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from qtoolkit.errors import warn

X = torch.rand(2, 4)
LINES = Path(__file__).read_text().splitlines()
LEARNED = qt.QConfigMapping().set_global(qt.QConfig(*[qt.QuantSpec(bits=4, quantizer="lsq")] * 2))


LAYER_OF_PACKAGE = """
class Says(Module):
    def forward(self, x):
        warn("layer: said")
        return x
"""
OF_PACKAGE = {"__name__": "qtoolkit.nn.layers", "warn": warn, "Module": nn.Module}
exec(LAYER_OF_PACKAGE, OF_PACKAGE)
Says = OF_PACKAGE["Says"]


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(Says())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def lines_of(call: Callable[[], object], words: str) -> list[str]:
    """Return the lines of this file that the warnings with some words name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    said = [each for each in caught if words in str(each.message)]
    assert said
    assert {each.filename for each in said} == {__file__}
    return [LINES[each.lineno - 1].strip() for each in said]


def prepared(*layers: nn.Module, **options: object) -> nn.Module:
    return qt.prepare(nn.Sequential(*layers), X, backend="onnxruntime", **options)


def calibrated(*layers: nn.Module, batch: torch.Tensor = X, **options: object) -> nn.Module:
    model = prepared(*layers, **options)
    qt.calibrate(model, [batch], progress=False)
    return model


def test_prepare() -> None:
    def call() -> None:
        mapping = qt.QConfigMapping().set_object_type(nn.GRU, None)
        qt.prepare(nn.Sequential(nn.Linear(4, 2)), X, backend="onnxruntime", qconfig_mapping=mapping)

    assert lines_of(call, "a rule for GRU")[0].startswith("qt.prepare(")


def test_replace() -> None:
    def call() -> None:
        qt.quant_modules.replace(
            nn.Sequential(nn.Linear(4, 2)), backend="onnxruntime", custom={nn.GLU: qt.nn.QuantLinear}
        )

    assert lines_of(call, "custom names GLU")[0].startswith("qt.quant_modules.replace(")


def test_calibrate() -> None:
    model = prepared(nn.Linear(4, 2), qconfig_mapping=LEARNED)

    def call() -> None:
        qt.calibrate(model, [torch.zeros(2, 4)], progress=False)

    def block() -> None:
        with qt.calibrating(model):
            model(torch.zeros(2, 4))

    assert lines_of(call, "has seen zeros only")[0].startswith("qt.calibrate(")
    assert lines_of(block, "has seen zeros only")[0].startswith("with qt.calibrating(")


def test_the_step_of_an_optimizer() -> None:
    model = calibrated(nn.Linear(4, 2), qconfig_mapping=LEARNED).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def call() -> None:
        for _ in range(3):
            model(100 * X).sum().backward()
            optimizer.step()

    assert set(lines_of(call, "of its input after 2 steps")) == {"optimizer.step()"}


def test_convert() -> None:
    model = calibrated(nn.Linear(4, 2))
    qt.disable_quantization(model)

    def call() -> None:
        qt.convert(model)

    assert lines_of(call, "are off and stay off") == ["qt.convert(model)"]


def test_export(tmp_path: Path) -> None:
    model = calibrated(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model.set_submodule("2", nn.Linear(4, 2))

    def call() -> None:
        qt.export_onnx(model, X, tmp_path / "model.onnx")

    assert lines_of(call, "layers added to the model after")[0].startswith("qt.export_onnx(")


@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_the_forward_of_a_layer(how: str) -> None:
    """In eager code the user's line is in forward; a graph has none, and it is the call of the model."""
    model = User()
    if how == "graph":
        model = calibrated(nn.Linear(4, 4), Says(), untraced=["1"])

    def call() -> None:
        model(X)

    assert lines_of(call, "layer: said") == ["return self.layer(x)" if how == "eager" else "model(X)"]


def test_scripts_of_pytorch_quantization() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(fake_quant=True))

    def call() -> None:
        quantizer.amax = None
        print(quantizer.scale)

    assert lines_of(call, "setting amax to None") == ["quantizer.amax = None"]
    assert lines_of(call, "there is no scale") == ["print(quantizer.scale)"]


def test_code_without_a_line_of_the_user_warns_at_the_outermost_frame() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", "__name__ = 'qtoolkit'; from qtoolkit.errors import warn; warn('said')"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stderr == "<string>:1: UserWarning: said\n"
