"""In training the range of a weight follows the weight, until it is frozen."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from tests.copies import made_once

IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
INDEX = torch.tensor([[1, 4, 7], [0, 9, 1]])


class Tied(nn.Module):
    """Two functions with one weight, which has a quantizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.weight)), self.weight)


class Function(nn.Module):
    """A layer written as a function, with a weight that the graph computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32).reshape(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2)


def conv_bn() -> nn.Module:
    """Return a convolution whose weight is quantized as the batch norm scales it."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 4)), ROWS),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), IMAGE),
    "conv_bn": (conv_bn, IMAGE),
    "conv_transpose": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), IMAGE),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 4)), INDEX),
    "sparse_embedding": (lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True)), INDEX),
    "lstm": (lambda: nn.LSTM(8, 4, batch_first=True), ROWS),
    "function": (Function, ROWS),
    "tied_functions": (Tied, ROWS),
}
SPECS = {
    "int8": qt.QuantSpec(axis=0),
    "per_tensor": qt.QuantSpec(),
    "int4": qt.QuantSpec(bits=4, axis=0),
    "asymmetric": qt.QuantSpec(symmetric=False, signed=False),
    "moving_average": qt.QuantSpec(axis=0, observer="moving_average"),
    "groups": qt.QuantSpec(axis=1, group_size=4),
    "pow2": qt.QuantSpec(pow2_scale=True),
    "nnie": qt.QuantSpec(format="nnie"),
}
ROUTES = {"prepare": qt.prepare, "replace": qt.quant_modules.replace}
CASES = [
    (name, route)
    for name in LAYERS
    for route in ROUTES
    if (name, route) not in {("lstm", "prepare"), ("function", "replace"), ("tied_functions", "replace")}
]


@made_once
def calibrated(name: str, route: str = "prepare", spec: qt.QuantSpec | None = None) -> tuple[nn.Module, Tensor]:
    """Return a quantized model in training mode, and its input."""
    build, x = LAYERS[name]
    torch.manual_seed(0)
    mapping = qt.QConfigMapping()
    if spec is not None:
        mapping = mapping.set_global(qt.QConfig(qt.QuantSpec(), spec))
    if "embedding" in name:
        mapping = mapping.set_object_type(nn.Embedding, qt.QConfig(None, qt.QuantSpec(axis=0)))
    model = ROUTES[route](build(), qconfig_mapping=mapping, backend="openvino")
    qt.calibrate(model, [x], progress=False)
    return model.train(), x


def step(model: nn.Module, x: Tensor, factor: float = 3.0) -> None:
    """Run forward and backward, then multiply every parameter, as a training step may."""
    output: Any = model(x)
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def of_weights(model: nn.Module) -> dict[str, TensorQuantizer]:
    return {name: quantizer for name, quantizer in quantizers_of(model).items() if quantizer.of_weight}


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale.clone() for name, quantizer in of_weights(model).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def recalibrated(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the scales that calibration gives the weights as they are."""
    fresh = copy.deepcopy(model)
    qt.calibrate(fresh, [x], progress=False)
    return scales(fresh)


@pytest.mark.parametrize(("name", "route"), CASES)
def test_scales_after_training_are_those_of_the_trained_weights(name, route):
    model, x = calibrated(name, route)
    before = scales(model)
    for _ in range(3):
        step(model, x)
    after = scales(model.eval())
    assert all(bool((after[name] > 2 * before[name]).any()) for name in before)
    assert_same(after, recalibrated(model, x))


@pytest.mark.parametrize("name", ["linear", "function"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_every_spec_of_a_range_follows(name, spec):
    model, x = calibrated(name, spec=spec)
    for factor in (3.0, 0.5, 4.0):
        step(model, x, factor)
    assert_same(scales(model.eval()), recalibrated(model, x))


@pytest.mark.parametrize(("name", "route"), CASES)
def test_no_weight_of_a_training_step_is_out_of_range(name, route):
    """A weight out of range gets no gradient."""
    model, x = calibrated(name, route)
    step(model, x, 10.0)
    model(x)
    for quantizer in of_weights(model).values():
        lo, hi = quantizer.observer.range()
        assert bool((torch.maximum(-lo, hi) <= quantizer.amax.reshape(lo.shape) * (1 + 1e-6) * 128 / 127).all())


def test_training_from_a_tiny_initialization_reaches_the_float_loss():
    """Weights that grow a hundredfold would be clipped at the range that calibration gave them."""

    def trained(*, quantize: bool, freeze: bool = False) -> float:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.2)
        x = torch.randn(256, 8)
        target = 10 * x[:, :1] - 6 * x[:, 1:2]
        if quantize:
            activations = qt.QuantSpec(observer="moving_average")
            mapping = qt.QConfigMapping().set_global(qt.QConfig(activations, qt.QuantSpec(axis=0)))
            model = qt.prepare(model, qconfig_mapping=mapping, backend="openvino")
            qt.calibrate(model, [x], progress=False)
            for quantizer in quantizers_of(model).values():
                quantizer.observing = not quantizer.of_weight
            if freeze:
                qt.freeze_ranges(model, "weights").apply()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(150):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert trained(quantize=True) < trained(quantize=False) + 0.5
    assert trained(quantize=True, freeze=True) > 10


@pytest.mark.parametrize("which", ["all", "weights"])
@pytest.mark.parametrize(("name", "route"), CASES)
def test_frozen_ranges_stay(name, route, which):
    model, x = calibrated(name, route)
    step(model, x)
    model.eval()
    before = scales(model.train())
    qt.freeze_ranges(model, which).apply()
    step(model, x)
    assert_same(scales(model), before)
    assert_same(scales(model.eval()), before)


def test_freezing_activations_leaves_the_weights_free():
    model, x = calibrated("linear")
    before = scales(model)["0.weight_quantizer"]
    qt.freeze_ranges(model, "activations").apply()
    step(model, x)
    model.eval()
    assert bool((scales(model)["0.weight_quantizer"] > 2 * before).all())


def test_freezing_stops_observers_and_a_with_block_restores_everything():
    model, x = calibrated("linear")
    for quantizer in quantizers_of(model).values():
        quantizer.observing = True
    with qt.freeze_ranges(model):
        before = {name: quantizer.scale.clone() for name, quantizer in quantizers_of(model).items()}
        step(model, 5 * x)
        assert_same({name: quantizer.scale for name, quantizer in quantizers_of(model).items()}, before)
    assert all(quantizer.observing and quantizer.following for quantizer in quantizers_of(model).values())


def test_a_range_that_the_user_set_stays():
    model, x = calibrated("linear")
    quantizer = model.get_submodule("0.weight_quantizer")
    assert isinstance(quantizer, TensorQuantizer)
    quantizer.amax = 0.25
    step(model, x)
    model(x)
    torch.testing.assert_close(quantizer.amax, torch.full((4,), 0.25))
    quantizer.following = True
    model(x)
    assert bool((quantizer.amax != 0.25).all())


@pytest.mark.parametrize(
    "spec",
    [qt.QuantSpec(observer="histogram"), qt.QuantSpec(axis=0, quantizer="lsq")],
    ids=["histogram", "lsq"],
)
def test_histograms_and_learned_scales_do_not_follow(spec):
    model, x = calibrated("linear", spec=spec)
    before = scales(model)
    assert not of_weights(model)["0.weight_quantizer"].follows
    model(x)
    model.eval()
    assert_same(scales(model), before)


def test_activations_keep_their_calibrated_range():
    model, x = calibrated("linear")
    (activation,) = (quantizer for quantizer in quantizers_of(model).values() if not quantizer.of_weight)
    before = activation.scale.clone()
    step(model, 100 * x)
    assert torch.equal(activation.scale, before)


@pytest.mark.parametrize(("name", "route"), CASES)
def test_a_loaded_state_with_frozen_ranges_is_not_touched_by_changes_of_mode(name, route):
    """The state dict has no metadata to say that they were frozen, so the model that loads it has to know."""
    model, _ = calibrated(name, route)
    qt.freeze_ranges(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for key in state:
        if key.endswith("weight_quantizer._scale") or ("weight_quantizers." in key and key.endswith("._scale")):
            state[key] *= 0.5
    model.load_state_dict(state)
    model.train()
    model.eval()
    assert_same(dict(model.state_dict()), state)


@pytest.mark.parametrize(("name", "route"), CASES)
def test_converting_in_training_mode_takes_the_trained_weights(name, route):
    model, x = calibrated(name, route)
    step(model, x)
    converted = qt.convert(model)
    torch.testing.assert_close(converted(x), model.eval()(x))
    assert_same(scales(model), recalibrated(model, x))


@pytest.mark.parametrize("name", ["linear", "function"])
def test_the_mode_of_a_model_that_diverged_can_be_changed(name):
    model, x = calibrated(name)
    step(model, x, torch.nan)
    assert not any(module.training for module in model.eval().modules())
    with pytest.raises(ValueError, match="convert: '.*weight' has NaN"):
        qt.convert(model)


@pytest.mark.parametrize(("name", "route"), CASES)
def test_a_new_parameter_in_eval_mode_gives_the_range(name, route):
    model, _ = calibrated(name, route)
    model.eval()
    before = {name: quantizer.scale for name, quantizer in quantizers_of(model).items() if quantizer.of_weight}
    for module in model.modules():
        for parameter, value in list(module.named_parameters(recurse=False)):
            setattr(module, parameter, nn.Parameter(3 * value.detach()))
    model.eval()
    factor = 9 if (name, route) == ("conv_bn", "prepare") else 3  # the batch norm's too, where it is linked
    for quantizer, scale in before.items():
        torch.testing.assert_close(quantizers_of(model)[quantizer].scale, factor * scale)


def test_a_step_with_quantization_off_is_followed_too():
    model, x = calibrated("linear")
    with qt.disable_quantization(model):
        step(model, x)
    assert_same(scales(model.eval()), recalibrated(model, x))


def test_copies_and_pickles_keep_the_state():
    model, _ = calibrated("linear")
    qt.freeze_ranges(model).apply()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not any(quantizer.following for quantizer in quantizers_of(other).values())


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
def test_recomputation_gives_the_same_gradients(observer):
    model, x = calibrated("linear", spec=qt.QuantSpec(bits=4, axis=0, observer=observer))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(3)
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        y.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(gradients[1], gradients[0])


def test_the_description_says_which_ranges_follow():
    model, _ = calibrated("linear")
    assert "follows the weight" in repr(of_weights(model)["0.weight_quantizer"])
    qt.freeze_ranges(model).apply()
    assert "follows the weight" not in repr(model)


def test_the_report_says_which_ranges_follow():
    model, _ = calibrated("linear")
    assert "1 of 1 weight ranges follow the weights in training" in str(qt.quantization_report(model))
    qt.freeze_ranges(model).apply()
    assert "0 of 1 weight ranges follow" in str(qt.quantization_report(model))
    assert "follow" not in str(qt.quantization_report(qt.convert(model)))


# ---- transforms of torch.func


def ensemble(make) -> float:
    """The largest difference between two models and one call of both, by torch.vmap over their states."""
    models = [make(), make()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.3)
        for model in models:
            model.train(model.training)  # in eval mode with the ranges of these weights, which transforms do not take
    x = torch.rand(2, 3, 8, 8)
    states = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    both = torch.vmap(lambda state: torch.func.functional_call(models[0], state, (x,)))(stacked)
    return max(float((y - model(x)).abs().max()) for y, model in zip(both.unbind(), models, strict=True))


def transformed(how: str, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model = (
        qt.prepare(float_model, backend="tensorrt")
        if how == "prepared"
        else qt.quant_modules.replace(float_model, backend="tensorrt")
    )
    qt.calibrate(model, [torch.rand(4, 3, 8, 8)], progress=False)
    return qt.freeze_ranges(model) and model if frozen else model


@pytest.mark.parametrize("how", ["prepared", "replaced"])
def test_models_without_moving_ranges_are_one_call_under_vmap(how: str) -> None:
    assert ensemble(lambda: transformed(how).eval()) < 1e-6
    assert ensemble(lambda: transformed(how, frozen=True)) < 1e-6


@pytest.mark.parametrize("how", ["prepared", "replaced"])
@pytest.mark.parametrize("which", ["activations", "weights"])
def test_ranges_that_follow_are_refused_under_transforms(how: str, which: str) -> None:
    model, x = transformed(how), torch.rand(2, 3, 8, 8)
    qt.freeze_ranges(model, {"activations": "weights", "weights": "activations"}[which])
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    named = "weight_quantizer" if which == "weights" else "input"
    words = rf"quantizer '.*{named}.*' changes its range .* call model.eval\(\) or qtoolkit.freeze_ranges\(model\)"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    with pytest.raises(NotImplementedError, match=words):
        torch.vmap(lambda one: model(one[None]), randomness="same")(x) if which != "weights" else ensemble(
            lambda: model
        )


# ---- ranges that do not follow


@pytest.mark.parametrize("how", ["prepared", "replaced and fused", "set by amax"])
def test_convert_says_which_weights_a_frozen_range_clips(how: str, recwarn) -> None:
    torch.manual_seed(0)
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).train()
    if how == "replaced and fused":
        model = qt.quant_modules.replace(qt.fuse_modules(float_model, [["0", "1"], ["2", "3"]]), backend="tensorrt")
    else:
        model = qt.prepare(float_model, backend="tensorrt")
    qt.calibrate(model, [torch.rand(8, 3, 8, 8)], progress=False)
    quantizer = model.get_submodule("0.weight_quantizer")
    if how == "set by amax":
        quantizer.amax = quantizer.amax.clone()
    else:
        qt.freeze_ranges(quantizer)
    qt.convert(model)
    with torch.no_grad():
        for bn in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            bn.weight.mul_(10)
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match=r"convert: ranges that were frozen or set .* clip .*: '0.weight_quantizer' \(\d+"
    ):
        qt.convert(model)
    quantizer.following = True
    qt.convert(model)
    assert not recwarn.list
