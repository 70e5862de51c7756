"""NaN and infinities in training: they move no range, are counted, and stop the training where one asks for it."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

GOOD = torch.linspace(-1, 1, 32).reshape(4, 8)


def bad(value: float) -> Tensor:
    x = GOOD.clone() * 100
    x[1, 3] = value
    return x


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("quantizing", [True, False])
@pytest.mark.parametrize(
    "how", [{}, {"axis": 1}, {"format": "nnie"}, {"quantizer": "pact"}, {"pow2_scale": True}], ids=str
)
def test_one_bad_batch_moves_no_range(value: float, observer: str, quantizing: bool, how: dict) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(observer=observer, **how))
    with qt.calibrating(quantizer):
        quantizer(GOOD)
    quantizer.observing, quantizer.quantizing = True, quantizing
    before = copy.deepcopy(quantizer)
    quantizer(bad(value))
    columns = torch.arange(8) == 3 if quantizer.spec.axis == 1 else torch.tensor(True)
    for name in ("lo", "hi"):
        kept = getattr(quantizer.observer, name) == getattr(before.observer, name)
        assert torch.equal(kept.reshape(columns.shape), columns), name
    assert torch.equal(torch.as_tensor(quantizer.observer.skipped).reshape(columns.shape), columns.long())
    assert quantizer.scale.isfinite().all()
    assert "has skipped NaN or infinities" in repr(quantizer)
    assert "has skipped" not in repr(before)
    quantizer(GOOD)
    assert quantizer(GOOD).isfinite().all()


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    prepared = qt.prepare(model, backend="onnxruntime")
    qt.calibrate(prepared, [GOOD], progress=False)
    return prepared.train()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_batch_that_is_not_trained_on_leaves_the_model_as_it_was(value: float) -> None:
    """As a gradient scaler skips the step of a batch whose gradients are not finite."""
    model = net()
    for quantizer in qt.quantizers_of(model).values():
        quantizer.observing = not quantizer.of_weight
    model(GOOD)
    before = copy.deepcopy(model.state_dict())
    model(bad(value))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model(GOOD).isfinite().all()


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_training_stops_where_one_asks_for_it(quantizer: str) -> None:
    model = net()
    with qt.stop_on_nonfinite(model):
        model(GOOD)
        with pytest.raises(
            ValueError, match=r"'activation_quantizers.input_1' got NaN or infinities: the layer before"
        ):
            model(bad(torch.nan))
    model(bad(torch.nan))
    qt.stop_on_nonfinite(model, "weights").apply()
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"'2.weight_quantizer' got NaN or infinities: the weight, or the batch norm"):
        model(GOOD)


def test_calibration_names_the_quantizer_and_changes_nothing() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="'activation_quantizers.input_1' has observed NaN or infinities"):
        qt.calibrate(model, [GOOD, bad(torch.nan), GOOD], progress=False)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("observer", ["minmax", "moving_average", "histogram"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_and_scales_are_at_least_float32(
    dtype: torch.dtype, observer: str, quantizer: str, symmetric: bool
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        spec = qt.QuantSpec(observer=observer, quantizer=quantizer, signed=symmetric, symmetric=symmetric)
        model = nn.Sequential(nn.Linear(8, 2), qt.TensorQuantizer(spec))
        qt.calibrate(model, [GOOD.to(dtype)], progress=False)
        model(GOOD.to(dtype)).sum().backward()
        assert model(GOOD.to(dtype)).dtype == dtype
        assert model[1].scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    finally:
        torch.set_default_dtype(before)
