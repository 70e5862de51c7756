"""Switches over quantizers: all, weights or activations alone, prepared and converted models, exceptions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X = torch.randn(4, 8)


class Net(nn.Module):
    """A layer, a function with a weight, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fc(x), self.weight) + x


def prepared_net() -> nn.Module:
    prepared = qt.prepare(Net().eval(), backend="openvino")
    qt.calibrate(prepared, [X], progress=False)
    return prepared


def states(model: nn.Module) -> dict[str, bool]:
    return {name: q.quantizing for name, q in model.named_modules() if isinstance(q, qt.TensorQuantizer | qt.Grid)}


@pytest.mark.parametrize("make", [prepared_net, lambda: qt.convert(prepared_net())], ids=["prepared", "converted"])
@pytest.mark.parametrize(
    ("which", "off"),
    [
        ("weights", {"fc.weight_quantizer", "weight_quantizers.linear"}),
        ("activations", {"activation_quantizers.x", "activation_quantizers.fc", "activation_quantizers.linear"}),
    ],
)
def test_weights_or_activations_alone(make: Callable[[], nn.Module], which: str, off: set[str]) -> None:
    model = make()
    with qt.disable_quantization(model, which):
        assert {name for name, on in states(model).items() if not on} == off
        with qt.enable_quantization(model, which):
            assert all(states(model).values())
    assert all(states(model).values())


def test_a_converted_model_computes_in_float_with_quantizers_off() -> None:
    model = Net().eval()
    prepared = qt.prepare(model, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    converted = qt.convert(prepared)
    assert not torch.equal(converted(X), model(X))
    with qt.disable_quantization(converted):
        assert torch.equal(converted(X), model(X))
    with pytest.raises(RuntimeError, match="shapes"), qt.disable_quantization(converted):
        converted(X[:, 1:])
    assert all(states(converted).values())
    qt.disable_quantization(converted).apply()
    assert torch.equal(converted(X), model(X))


def test_fixed_scales_observe_nothing() -> None:
    with pytest.raises(
        ValueError, match="calibrating: a converted model has fixed scales and observes no ranges; pass"
    ):
        qt.calibrating(qt.convert(prepared_net()))


def test_which_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown which of disable_quantization: 'weight'; did you mean 'weights'"):
        qt.disable_quantization(prepared_net(), "weight")
