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


MAKE: dict[str, Callable[[], nn.Module]] = {
    "graph": prepared_net,
    "modules": lambda: replaced_net(qt.QuantSpec()),
    "dynamic": lambda: replaced_net(qt.QuantSpec(dynamic=True)),
    "shaped": lambda: replaced_net(qt.QuantSpec(bits=4, quantizer="apot")),
}


def replaced_net(activations: qt.QuantSpec) -> nn.Module:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activations, qt.QuantSpec(axis=0)))
    replaced = qt.quant_modules.replace(Net().eval(), mapping, backend="tensorrt")
    qt.calibrate(replaced, [X], progress=False)
    return replaced


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("which", ["weights", "activations"])
def test_quantizers_that_are_off_stay_off_in_the_converted_model(make: Callable[[], nn.Module], which: str) -> None:
    prepared = make().eval()
    qt.disable_quantization(prepared, which).apply()
    with pytest.warns(
        UserWarning, match=r"convert: \d quantizers are off and stay off, so that .*quantizer.*turns them"
    ):
        converted = qt.convert(prepared)
    assert torch.equal(converted(X), prepared(X))
    assert ", off" in str(converted)
    qt.enable_quantization(prepared).apply()
    assert not torch.equal(converted(X), prepared(X))
    qt.enable_quantization(converted).apply()
    assert torch.equal(converted(X), prepared(X))


def test_restored_quantizers_are_off_as_they_were() -> None:
    prepared = prepared_net()
    qt.disable_quantization(prepared, "activations").apply()
    with pytest.warns(UserWarning, match="stay off"):
        converted = qt.convert(prepared)
    restored = qt.convert(qt.prepare(Net().eval(), backend="openvino"), state_dict=converted.state_dict())
    assert torch.equal(restored(X), converted(X))
    assert states(restored) == states(converted)


def test_a_model_that_observes_is_converted_with_its_ranges() -> None:
    prepared = prepared_net()
    wanted = qt.convert(prepared)(X)
    with qt.calibrating(prepared):
        prepared(X)
        converted = qt.convert(prepared)
    assert all(states(converted).values())
    assert torch.equal(converted(X), wanted)


@pytest.mark.parametrize("off", ["fc.weight_quantizer", "activation_quantizers.x", "activation_quantizers.fc"])
def test_integer_arithmetic_with_a_quantizer_that_is_off(off: str) -> None:
    prepared = prepared_net().eval()
    prepared.get_submodule(off).disable()
    with pytest.warns(UserWarning, match="stay off"):
        converted = qt.convert(prepared, arithmetic="integer", runtime="onnxruntime")
    torch.testing.assert_close(converted(X), prepared(X), atol=0.02, rtol=0)


CALLS = {
    "disable_quantization": (qt.disable_quantization, {"quantizing": False}),
    "freeze_ranges": (qt.freeze_ranges, {"observing": False, "following": False}),
    "stop_on_nonfinite": (qt.stop_on_nonfinite, {"stopping": True}),
    "calibrating": (qt.calibrating, {"observing": True, "quantizing": False}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_call_acts_and_a_block_restores(name: str) -> None:
    switch, wanted = CALLS[name]
    model = prepared_net()
    quantizers = qt.quantizers_of(model).values()

    def found() -> list[dict[str, bool]]:
        return [{name: getattr(quantizer, name) for name in wanted} for quantizer in quantizers]

    before = found()
    with switch(model) as again:
        assert found() == [wanted] * len(quantizers)
        model(X)
    assert found() == before
    with again, again:
        assert found() == [wanted] * len(quantizers)
        model(X)
    assert found() == before
    switch(model)
    assert found() == [wanted] * len(quantizers)
    if name == "disable_quantization":
        qt.enable_quantization(model)
        assert found() == before


def test_a_block_after_apply_keeps_what_apply_set() -> None:
    model = prepared_net()
    off = qt.disable_quantization(model)
    off.apply()
    with off:
        pass
    assert not any(states(model).values())


def test_a_block_restores_no_more_than_it_sets() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec())
    with qt.stop_on_nonfinite(quantizer):
        quantizer.amax = 3.0
    assert not quantizer.following
