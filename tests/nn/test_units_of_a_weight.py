"""Scales in units of a weight: those of a weight that a batch norm's factor multiplies take each change of the factor."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.nn.batch_norm import divisor_of
from qtoolkit.quantizers.table import QUANTIZERS
from tests.quantizers.own import OWN

LEARNED: dict[str, dict[str, Any]] = {
    "lsq": {"axis": 0, "quantizer": "lsq"},
    "affine": {"axis": 0, "symmetric": False, "quantizer": "lsq_plus"},
    "pact": {"axis": 0, "quantizer": "pact"},
    "range": {"axis": 0, "symmetric": False, "quantizer": "learned_range"},
    # From the range: a start in another bin of a histogram would show in the slope of its staircase.
    "dsq": {"axis": 0, "quantizer": "dsq", "observer": "moving_average"},
    "apot": {"axis": 0, "quantizer": "apot"},
    "own": {"axis": 0, "quantizer": "log"},  # its scale is made of a parameter, `_scale`
}
OF_CHANNELS = {**LEARNED, "histogram": {"axis": 0, "observer": "histogram"}}
SPECS = {**OF_CHANNELS, "one scale": {"quantizer": "lsq"}}
each_spec = pytest.mark.parametrize("name", OF_CHANNELS)
ROUTES = ("prepare", "replace")
each_route = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZERS, "log", OWN["log"])


def spec_of(name: str) -> qt.QuantSpec:
    return qt.QuantSpec(**{"bits": 4, "axis": None, **SPECS[name]})


def layers(affine: bool = True) -> nn.Sequential:
    """Two convolutions, one of them depthwise, whose batch norms begin with other statistics than those of the data."""
    torch.manual_seed(0)
    parts = [
        *(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, affine=affine), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6, affine=affine)),
    ]
    return nn.Sequential(*parts).train()


def linked(route: str, name: str, model: nn.Module) -> Any:
    """A model whose batch norms multiply the weights before they are quantized; its activations stay in float."""
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, spec_of(name)))
    if route == "prepare":
        return qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
    fused = qt.fuse_modules(model, [["0", "1"], ["3", "4"]])
    return qt.quant_modules.replace(fused, mapping, backend="tensorrt10")


def batch(seed: int) -> Tensor:
    return 7 * torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(seed)) + seed % 3


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, qt.nn.QuantConv2d)]


def step(model: nn.Module, seed: int, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = (model(batch(seed)) - torch.sin(batch(seed))[:, :1, :5, :5]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@each_route
@each_spec
def test_a_training_is_that_of_weights_that_are_quantized_before_the_batch_norm(route: str, name: str) -> None:
    """The papers quantize the weight itself: the grid of the product, divided by the factor, has the same values and steps.

    Without gamma, whose gradient here has the rounding errors too. The first variances move by a factor of 600.
    """
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, spec_of(name)))
    plain: Any = qt.quant_modules.replace(layers(affine=False), mapping, backend="tensorrt10")
    for index in (1, 4):  # apart from its layer
        plain[index] = nn.Sequential(plain[index])
    model = linked(route, name, layers(affine=False))
    assert all(layer.batch_norm is None for layer in layers_of(plain))
    assert all(layer.takes_factor for layer in layers_of(model))
    both = [(each, torch.optim.SGD(qt.parameter_groups(each), 0.05, momentum=0.9)) for each in (model, plain)]
    for seed in range(12):
        mine, wanted = (step(each, seed, optimizer) for each, optimizer in both)
        assert mine == pytest.approx(wanted, rel=2e-4), seed
    for layer, other in zip(layers_of(model), layers_of(plain), strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-3, atol=1e-4)
        names = [n for n, _ in other.weight_quantizer.named_parameters()]
        assert bool(names) == (name in LEARNED)
        for each in names:
            mine, wanted = (q.get_parameter(each) for q in (layer.weight_quantizer, other.weight_quantizer))
            if name == "own":  # no ratio to a start, but the logarithm of the scale
                mine = mine - layer.weight_quantizer._factor.abs().log2()
            assert not torch.equal(wanted, torch.ones_like(wanted))
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


@each_route
@each_spec
def test_no_code_changes_with_the_factor(route: str, name: str) -> None:
    model = linked(route, name, layers())
    with torch.no_grad():
        model(batch(0))  # the first forward of a step
        before = [codes_of(layer) for layer in layers_of(model)]
        for layer in layers_of(model):
            layer.batch_norm.running_var.mul_(torch.linspace(0.01, 300, 6))
            layer.batch_norm.weight.mul_(torch.tensor([-1.0, 0.5, 2.0, 1e-3, 40.0, 1.0]))
        model(batch(0))
        for layer, codes in zip(layers_of(model), before, strict=True):
            flipped = torch.tensor([-1.0, 1, 1, 1, 1, 1]).view(-1, 1, 1, 1)
            positive = layer.weight_quantizer.zero_point is None
            same = slice(None) if positive and layer.weight_quantizer.spec.narrow else slice(1, None)
            assert torch.equal((codes * flipped)[same], codes_of(layer)[same])


@torch.no_grad()
def codes_of(layer: Any) -> Tensor:
    """The codes of the training step that has begun."""
    q = layer.weight_quantizer
    product = layer.scale_output_channels(
        layer.weight, divisor_of(layer.batch_norm, layer.batch_norm._variance_of_step)
    )
    shape = (-1, 1, 1, 1) if q.scale.dim() else ()
    zero = 0 if q.zero_point is None else q.zero_point.view(shape)
    return (q.quantize(product) / q.scale.view(shape) + zero).round()


@each_route
def test_one_scale_takes_what_all_factors_have_in_common(route: str) -> None:
    model = linked(route, "one scale", layers())
    with torch.no_grad():
        model(batch(0))
        before = [codes_of(layer) for layer in layers_of(model)]
        for layer in layers_of(model):
            layer.batch_norm.weight.mul_(0.001)
            layer.batch_norm.momentum = 0.0
        model(batch(0))
        for layer, codes in zip(layers_of(model), before, strict=True):
            factors = divisor_of(layer.batch_norm, layer.batch_norm._variance_of_step)
            torch.testing.assert_close(layer.weight_quantizer._factor, factors.square().mean().sqrt().reshape(()))
            assert codes.abs().max() == 8
            assert codes_of(layer).abs().max() >= 4


@each_route
def test_a_batch_norm_that_begins_with_zeros_trains_as_without_quantizers(route: str) -> None:
    """As in a residual branch (zero_init_residual): the factor is 1 before the first step, and a thousandth after it."""
    gammas = []
    for quantized in (False, True):
        model = layers()
        nn.init.zeros_(model[4].weight)
        model = linked(route, "lsq", model) if quantized else model
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for seed in range(10):
            step(model, seed, optimizer)
        gammas.append(model.get_submodule("4").weight.detach())
    used = layers_of(model)[1]
    assert (codes_of(used) != 0).float().mean() > 0.5
    assert float(gammas[1].abs().max()) < 2 * float(gammas[0].abs().max())  # 150 times, while the scale was that for 1


def test_what_stays_as_it_is() -> None:
    """Powers of two, and ranges that were set or frozen."""
    for spec in (qt.QuantSpec(axis=0, quantizer="tqt"), qt.QuantSpec(axis=0, pow2_scale=True)):
        model = qt.prepare(
            layers(), qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(None, spec)), backend="tensorrt10"
        )
        assert not any(layer.takes_factor for layer in layers_of(model))
        assert not any("_factor" in key for key in model.state_dict())
    model = linked("prepare", "histogram", layers())
    first, second = layers_of(model)
    first.weight_quantizer.amax = torch.full((6,), 3.0)
    qt.freeze_ranges(second)
    before = second.weight_quantizer.scale.clone()
    for seed in range(3):
        model(batch(seed))
        torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()
    assert torch.equal(first.weight_quantizer.amax, torch.full((6,), 3.0))
    assert torch.equal(second.weight_quantizer.scale, before)


@each_route
@each_spec
def test_evaluation_and_the_deployed_model_have_the_codes_of_the_next_step(route: str, name: str) -> None:
    model = linked(route, name, layers())
    optimizer = torch.optim.SGD(qt.parameter_groups(model), 0.02)
    for seed in range(5):
        step(model, seed, optimizer)
    evaluated = copy.deepcopy(model).eval()
    y = evaluated(batch(9))
    model(batch(5))  # the statistics before it are those of evaluation
    for layer, other in zip(layers_of(model), layers_of(evaluated), strict=True):
        assert torch.equal(layer.weight_quantizer.scale, other.weight_quantizer.scale)
    if name != "apot":  # whose levels need the eager code
        torch.testing.assert_close(qt.convert(evaluated)(batch(9)), y, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("at", [0, 1, 4])
@each_route
@pytest.mark.parametrize("name", ["lsq", "range", "histogram"])
def test_a_resumed_training_goes_on_bit_for_bit(route: str, name: str, at: int) -> None:
    fresh = linked(route, name, layers())
    model = copy.deepcopy(fresh)
    optimizer = torch.optim.SGD(qt.parameter_groups(model), 0.02, momentum=0.9)
    for seed in range(at):
        step(model, seed, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    others = torch.optim.SGD(qt.parameter_groups(fresh), 0.02, momentum=0.9)
    for part, state in zip((fresh, others), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for seed in range(at, 6):
        assert step(model, seed, optimizer) == step(fresh, seed, others)
    one, other = model.state_dict(), fresh.state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_an_earlier_version_begins_with_the_factor_that_it_has(strict: bool) -> None:
    model = linked("prepare", "lsq", layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for seed in range(3):
        step(model, seed, optimizer)
    state = {name: value for name, value in model.eval().state_dict().items() if not name.endswith("._factor")}
    other = linked("prepare", "lsq", layers())
    assert other.load_state_dict(state, strict=strict).missing_keys == []
    y = other.eval()(batch(7))
    torch.testing.assert_close(y, model(batch(7)))
    other.train()(batch(7))
    for layer, mine in zip(layers_of(other), layers_of(model), strict=True):
        assert torch.equal(layer.weight_quantizer.scale, mine.weight_quantizer.scale)


def test_an_average_of_state_dicts_has_scales_for_its_own_factor() -> None:
    """As the moving averages of timm and Ultralytics do: in place, without load_state_dict."""
    model = linked("prepare", "lsq", layers())
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for seed in range(20):
        step(model, seed, optimizer)
        for mine, other in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.lerp_(other, 0.3) if mine.is_floating_point() else mine.copy_(other)
    average.train().eval()
    for layer, other in zip(layers_of(average), layers_of(model.eval()), strict=True):
        torch.testing.assert_close(layer.weight_quantizer.scale, other.weight_quantizer.scale, rtol=0.15, atol=0)


@pytest.mark.parametrize("strategy", ["unscale", "frozen", "two_convolutions", "std_correction"])
def test_each_strategy_keeps_the_grid_in_units_of_the_weight(strategy: str) -> None:
    backend = replace(qt.backends["onnxruntime"], batch_norm=strategy)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, spec_of("lsq")))
    model = qt.prepare(layers(), qconfig_mapping=mapping, backend=backend)
    units = [layer.weight_quantizer.scale / divisor_of(layer.batch_norm).abs() for layer in layers_of(model)]
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "relative" not in n], 0.02)
    for seed in range(4):
        step(model, seed, optimizer)
    for layer, before in zip(layers_of(model.eval()), units, strict=True):
        factor = divisor_of(layer.batch_norm).abs().detach()
        torch.testing.assert_close(layer.weight_quantizer.scale / factor, before.detach(), rtol=1e-5, atol=0)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsq", "histogram"])
def test_compiled_code_takes_the_factor_before_each_forward(name: str) -> None:
    model = linked("prepare", name, layers())
    other = copy.deepcopy(model)
    run = compiled(other)
    optimizers = [torch.optim.SGD(each.parameters(), 0.02) for each in (model, other)]
    for seed in range(4):
        wanted = step(model, seed, optimizers[0])
        optimizers[1].zero_grad()
        loss = F.mse_loss(run(batch(seed)), torch.sin(batch(seed))[:, :1, :5, :5].expand(8, 6, 5, 5))
        loss.backward()
        optimizers[1].step()
        assert loss.item() == pytest.approx(wanted, rel=1e-4)
    for layer, mine in zip(layers_of(other), layers_of(model), strict=True):
        torch.testing.assert_close(layer.weight_quantizer.scale, mine.weight_quantizer.scale)


@each_route
def test_an_evaluation_between_forward_and_backward(route: str) -> None:
    """As for targets of the model itself: the scales take the factor of evaluation before backward needs them."""
    model = linked(route, "lsq", layers())
    y = model(batch(0))
    model.eval()(batch(1))
    model.train()
    y.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
