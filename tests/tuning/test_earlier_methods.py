"""Methods one after another: each takes the model without quantizers for the float model, and says where it is not."""

import copy
import warnings

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.nn.rounded import is_rounded

BATCHES = [torch.rand(32, 8) for _ in range(3)]


def calibrated(
    route: str = "prepare", train: bool = False, bits: int = 3, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    model[1].running_var.uniform_(0.5, 1.5)
    w = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=bits, axis=0)))
    model.train(train).to(dtype)
    prepared = (
        qt.prepare(model, qconfig_mapping=w, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, w, backend="tensorrt10")
    )
    qt.calibrate(prepared, batches(dtype), progress=False)
    return prepared


def batches(dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) for x in BATCHES]


METHODS = {
    "gptq": lambda model: qt.tuning.gptq(model, BATCHES, damping=0.01, progress=False),
    "reconstruct": lambda model: qt.tuning.reconstruct(model, BATCHES, steps=60, progress=False),
    "bias_correction": lambda model: qt.tuning.bias_correction(model, BATCHES, progress=False),
}


def warned(name: str, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        METHODS[name](model)
    return [str(each.message) for each in found]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", ["gptq", "reconstruct"])
def test_a_second_method_says_that_weights_are_rounded(first: str, train: bool) -> None:
    model = calibrated(train=train)
    assert not warned(first, model)
    moved = [name for name in ("0", "3") if not model.get_submodule(f"{name}.weight_quantizer").following]
    assert moved
    loaded = calibrated(train=train)
    loaded.load_state_dict(model.state_dict())
    for each in (copy.deepcopy(model), loaded):
        for second in METHODS:
            (sentence,) = warned(second, copy.deepcopy(each))
            assert sentence.startswith(f"{second}: the weights of {', '.join(map(repr, moved))} are already rounded")


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_rounding_says_that_biases_were_corrected(route: str) -> None:
    model = calibrated(route)
    assert not warned("bias_correction", model)
    (sentence,) = warned("gptq", copy.deepcopy(model))
    assert "has changed the biases of '0', '3' for weights that are rounded to nearest" in sentence
    assert not hasattr(model.get_submodule("3").to_float(), "bias_is_corrected")


def test_weights_of_training_are_not_rounded() -> None:
    for bits, dtype in ((2, torch.float32), (8, torch.float32), (8, torch.bfloat16), (3, torch.float16)):
        model = calibrated(bits=bits, dtype=dtype)
        assert not is_rounded(model.get_submodule("3"))
    zeros = calibrated()
    nn.init.zeros_(zeros.get_submodule("3").weight)
    qt.freeze_ranges(zeros)
    assert not is_rounded(zeros.get_submodule("3"))


def test_a_layer_with_a_scale_for_each_weight_is_not_taken_for_a_rounded_one() -> None:
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 4, 1)).eval(), backend="tensorrt10")
    images = [torch.randn(8, 8, 4, 4)]
    qt.calibrate(prepared, images, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.tuning.reconstruct(prepared, images, steps=2, progress=False)


def test_a_constant_weight_is_not_rounded() -> None:
    """It lies on its codes by itself, and none is chosen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.constant_(model[0].weight, 1 / 9)
    prepared = qt.prepare(model.eval(), backend="tensorrt10")
    qt.calibrate(prepared, BATCHES, progress=False)
    assert not warned("bias_correction", prepared)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_sensitivity_after_a_method_says_that_its_scores_are_wrong(route: str) -> None:
    """Rounded weights lose nothing when they are quantized, so that each layer seems to cost nothing."""

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(BATCHES[0]).square().mean())

    def measured(model: nn.Module) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            qt.debug.sensitivity(model, score, progress=False)
        return [str(each.message) for each in found]

    model = calibrated(route)
    assert not measured(model)
    corrected = copy.deepcopy(model)
    METHODS["gptq"](model)
    (sentence,) = measured(model)
    assert sentence.startswith("sensitivity: the layers '0', '3' have rounded weights (")
    METHODS["bias_correction"](corrected)
    (sentence,) = measured(corrected)
    assert sentence.startswith("sensitivity: the layers '0', '3' have corrected biases (")
