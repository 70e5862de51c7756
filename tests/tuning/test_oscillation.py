"""Dampening and freezing of oscillating weights: against plain formulas, on a toy, resumed, in two processes."""

import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import qtoolkit as qt
from qtoolkit.nn import QuantWeighted
from tests import processes
from tests.reference import Snapped
from tests.training.nets import ROUTES, SHAPE, Net

Dampening, Freezing = qt.tuning.OscillationDampening, qt.tuning.OscillationFreezing
each_route = pytest.mark.parametrize("route", ROUTES)
each_quantizer = pytest.mark.parametrize("quantizer", ["lsq", "fixed"])
EAGER = {"thresholds": (0.15, 0.1), "momentum": 0.08}  # freezes within some steps

# Layer, spec of its weight, groups of dimension 0 with scales of their own.
GRIDS: dict[str, tuple[Callable[[], nn.Module], qt.QuantSpec, int]] = {
    "tensor": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, axis=None, quantizer="lsq"), 1),
    "follows": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, axis=0), 1),
    "histogram": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, axis=0, observer="histogram"), 1),
    "blocks": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=3, axis=1, group_size=4, quantizer="lsq"), 1),
    "affine": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=3, axis=0, symmetric=False, quantizer="lsq_plus"), 1),
    "unsigned": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, signed=False, symmetric=False, axis=None), 1),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), qt.QuantSpec(bits=4, axis=0, quantizer="tqt"), 1),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), qt.QuantSpec(bits=4, axis=1, quantizer="lsq"), 2),
    "pact": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, axis=0, quantizer="pact"), 1),
    "learned_range": (
        lambda: nn.Linear(8, 6),
        qt.QuantSpec(bits=4, axis=0, symmetric=False, quantizer="learned_range"),
        1,
    ),
    "dsq": (lambda: nn.Linear(8, 6), qt.QuantSpec(bits=4, axis=0, quantizer="dsq"), 1),
}
each_grid = pytest.mark.parametrize("grid", GRIDS)


def replaced(layer: nn.Module, weight: qt.QuantSpec | None) -> Any:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, weight))
    return qt.quant_modules.replace(nn.Sequential(layer).train(), mapping, backend="tensorrt10")


def of_grid(grid: str) -> tuple[Any, Any]:
    """A model of one layer whose scales are no longer those of its weight, where they do not follow it, and its layer."""
    torch.manual_seed(0)
    make, spec, _ = GRIDS[grid]
    model = replaced(make(), spec)
    with torch.no_grad():
        model[0].weight.mul_(1.4)
    return model, model[0]


def snapped(grid: str, layer: Any) -> Snapped:
    """The oracle's view of the layer's weight, on the range of the weight where it follows."""
    spec, group = GRIDS[grid][1:]
    quantizer = copy.deepcopy(layer.weight_quantizer)
    if quantizer.follows:
        quantizer.follow(layer.weight.detach())
    where = (spec.qmin, spec.qmax, spec.axis, group, spec.group_size or 0)
    return Snapped(layer.weight.detach(), quantizer.scale, quantizer.zero_point, *where)


def net(route: str, quantizer: str = "lsq") -> nn.Module:
    """The network of the training tests in a few bits, calibrated, with a batch norm whose factors are not 1."""
    torch.manual_seed(0)
    floats = Net()
    with torch.no_grad():
        floats.bn.weight.copy_(torch.tensor([-1.5, 0.0, 0.5, 3.0, 1.0, -0.2, 0.9, 2.0]))
        floats.bn.running_var.copy_(torch.linspace(0.05, 2.0, 8))
    activation = qt.QuantSpec(bits=8, signed=False, symmetric=False, quantizer=quantizer)
    weight = qt.QuantSpec(bits=3, axis=0, quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    if route == "graph":
        model: nn.Module = qt.prepare(floats.train(), qconfig_mapping=mapping, backend="onnxruntime")
    else:
        fused = qt.fuse_modules(floats.train(), [["conv", "bn"]])
        model = qt.quant_modules.replace(fused, mapping, backend="onnxruntime")
    qt.calibrate(model, [batch(0)], progress=False)
    return model.train()


def batch(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3)


def task(model: nn.Module, seed: int) -> Tensor:
    """A loss whose gradient is not the same from step to step."""
    target = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 + seed))
    return (model(batch(seed)) - target).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(qt.parameter_groups(model, weight_decay=1e-2), 0.02, momentum=0.5)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    freezing: Freezing,
    dampening: Dampening,
    steps: int,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (task(model, freezing.steps) + dampening()).backward()
        optimizer.step()
        freezing.step()
        dampening.step()


def at_end(dampening: Dampening) -> Dampening:
    dampening.steps = dampening.total_steps
    return dampening


# ---- the dampening loss


@each_grid
def test_the_loss_is_the_formula_and_its_gradient_goes_to_the_weight_alone(grid: str) -> None:
    model, layer = of_grid(grid)
    x = snapped(grid, layer)
    low, high = (x.qmin - x.z) * x.s, (x.qmax - x.z) * x.s
    error = np.clip(x.x, low, high) - x.values()
    per_channel = layer.weight.numel() // 6
    loss = at_end(Dampening(model, 10, largest=0.7))()
    assert loss.item() == pytest.approx(0.7 * np.square(error).sum() / per_channel, rel=1e-5)
    loss.backward()
    between = (low < x.x) & (x.x < high)
    if grid not in ("follows", "unsigned", "learned_range"):
        assert 0 < between.mean() < 1
    wanted = torch.from_numpy(2 * 0.7 * error / per_channel * between).float()
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-5, atol=1e-8)
    assert all(p.grad is None for name, p in model.named_parameters() if name != "0.weight")


def test_the_coefficient_rises_along_a_cosine() -> None:
    model, _ = of_grid("tensor")
    dampening = Dampening(model, 100, largest=0.4, begin=20)
    found = []
    for _ in range(120):
        found.append(dampening.coefficient)
        dampening.step()
    assert found[:21] == [0.0] * 21
    for step in range(20, 101):
        assert found[step] == pytest.approx(0.4 * (1 - math.cos(math.pi * (step - 20) / 80)) / 2)
    assert found[60] == pytest.approx(0.2)
    assert found[100:] == [0.4] * 20
    assert repr(Dampening(model, 100)) == "OscillationDampening(step 0 of 100: coefficient 0, weights: 1)"


def factors(model: nn.Module) -> Tensor:
    """gamma / sqrt(var + eps) of the batch norm of `net`, 1 for gamma 0, for the weight of its convolution."""
    bn = model.get_submodule("bn")
    factor = (bn.weight / (bn.running_var + bn.eps).sqrt()).detach()
    return torch.where(factor == 0, 1.0, factor).view(-1, 1, 1, 1)


@each_quantizer
@each_route
def test_behind_the_factor_of_a_batch_norm_the_grid_is_divided_by_it(route: str, quantizer: str) -> None:
    model = net(route, quantizer)
    for name in ("stem", "fc"):
        model.get_submodule(name).weight_quantizer.disable()
    conv: Any = model.get_submodule("conv")
    dampening, factor = at_end(Dampening(model, 10, largest=1.0)), factors(model)
    model(batch(1) * 5)  # moves the running variance after the factor was taken
    assert not torch.allclose(factors(model), factor, rtol=1e-3)
    loss = dampening()
    weight = conv.weight.detach()
    scale = conv.weight_quantizer.scale.view(-1, 1, 1, 1)
    steps = scale / factor  # negative where gamma is
    codes = (weight / steps).round().clamp(-4, 3)
    inside = (weight / steps > -4) & (weight / steps < 3)
    error = torch.where(inside, weight - codes * steps, 0.0)
    torch.testing.assert_close(loss.detach(), error.square().sum() / 72, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(conv.weight.grad, 2 * error / 72, rtol=1e-3, atol=1e-6)
    assert model.get_submodule("bn").weight.grad is None
    assert model.get_submodule("stem").weight.grad is None


def test_a_half_precision_weight_has_the_loss_of_its_values() -> None:
    model, layer = of_grid("tensor")
    model.bfloat16()
    wide, _ = of_grid("tensor")
    with torch.no_grad():
        wide[0].weight.copy_(layer.weight)
    loss = at_end(Dampening(model, 1))()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, at_end(Dampening(wide, 1))())
    loss.backward()
    assert layer.weight.grad.dtype == torch.bfloat16


# ---- what is tracked


class Plain:
    """The paper's algorithm for one weight, in numbers; its average begins as a mean."""

    def __init__(self, code: int) -> None:
        self.code, self.direction, self.frequency, self.average, self.frozen = code, 0, 0.0, 0.0, False
        self.steps = 0

    def step(self, code: int, momentum: float, threshold: float | None) -> None:
        code = self.code if self.frozen else code
        change = (code > self.code) - (code < self.code)
        turned = change != 0 and change == -self.direction
        self.steps += 1
        self.frequency = momentum * turned + (1 - momentum) * self.frequency
        share = momentum if momentum * self.steps > 1 else 1 / self.steps
        self.average = share * code + (1 - share) * self.average
        self.direction = change or self.direction
        if threshold is not None and self.frequency > threshold and not self.frozen:
            self.frozen = True
            between = sorted((code, code - self.direction))
            code = min(max(round(self.average), between[0]), between[1])
        self.code = code


@each_grid
def test_codes_frequencies_and_frozen_weights_are_those_of_the_algorithm(grid: str) -> None:
    model, layer = of_grid(grid)
    freezing = Freezing(model, 40, thresholds=(0.4, 0.2), momentum=0.15, begin=8)
    plain: list[Plain] = []
    base, random = layer.weight.detach().clone(), torch.Generator().manual_seed(1)
    size = snapped(grid, layer).s.mean()
    for step in range(1, 41):
        with torch.no_grad():
            noise = size * torch.rand(base.shape, generator=random)
            layer.weight.copy_(base + noise)
        before = snapped(grid, layer)
        codes = before.codes().reshape(-1).tolist()
        freezing.step()
        threshold = None if step < 8 else 0.2 + 0.2 * (1 + math.cos(math.pi * (step - 8) / 32)) / 2
        assert freezing.threshold == (None if threshold is None else pytest.approx(threshold))
        plain = plain or [Plain(code) for code in codes]
        for each, code in zip(plain, codes, strict=True):
            each.step(code, 0.15, threshold)
        state = freezing.state_dict()["weights"]["0.weight"]
        assert state["codes"].flatten().tolist() == [each.code for each in plain]
        assert state["frozen"].flatten().tolist() == [each.frozen for each in plain]
        for name in ("frequency", "average"):
            found = [getattr(each, name) for each in plain]
            torch.testing.assert_close(state[name].flatten(), torch.tensor(found), rtol=1e-5, atol=1e-5)
        values = torch.from_numpy((state["codes"].numpy() - before.z) * before.s).float()
        wanted = torch.where(state["frozen"], values, base + noise)
        torch.testing.assert_close(layer.weight.detach(), wanted, rtol=1e-6, atol=1e-7)
        assert layer.weight_quantizer.follows == (grid in ("follows", "unsigned") and step < 8)
    frozen = sum(each.frozen for each in plain) / len(plain)
    assert 0.2 < frozen <= 1
    report = freezing.report()
    assert report.frozen == report.layers[0].frozen == pytest.approx(frozen)
    oscillating = sum(each.frequency > 0.005 and not each.frozen for each in plain) / len(plain)
    assert report.oscillating == pytest.approx(oscillating)


@each_quantizer
@each_route
def test_the_codes_are_those_that_the_next_forward_quantizes(route: str, quantizer: str) -> None:
    model = net(route, quantizer)
    freezing, dampening, optimizer = Freezing(model, 30, **EAGER), Dampening(model, 30), sgd(model)
    names = ("stem", "conv", "fc")
    seen: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).weight_quantizer.register_forward_hook(
            lambda module, args, y, name=name: seen.__setitem__(name, (y / scale_like(module, y)).round().int())
        )
    frozen = 0
    for _ in range(30):
        train(model, optimizer, freezing, dampening, 1)
        state = freezing.state_dict()["weights"]
        model(batch(freezing.steps))
        for name in names:
            assert torch.equal(seen[name], state[f"{name}.weight"]["codes"]), name
        frozen = int(state["conv.weight"]["frozen"].sum())
    assert 0 < frozen < 8 * 72
    assert freezing.report().frozen > 0.02
    assert model.get_submodule("conv").batch_norm is not None


def scale_like(quantizer: qt.TensorQuantizer, y: Tensor) -> Tensor:
    return quantizer.scale.view(-1, *[1] * (y.dim() - 1))


def test_groups_of_a_transposed_convolution_behind_a_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, -2.0, 0.3, 5.0, 1.5, -0.7]))
    spec = qt.QuantSpec(bits=4, axis=1, quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, spec))
    prepared = qt.prepare(model.train(), qconfig_mapping=mapping, backend="tensorrt10")
    layer: Any = prepared.get_submodule("0")
    assert layer.batch_norm is not None
    assert layer.weight_quantizer.scale.shape == (6,)
    factor = layer.batch_norm.weight.detach() / (1 + layer.batch_norm.eps) ** 0.5
    steps = torch.empty(4, 3, 1, 1)
    for source in range(4):
        for output in range(3):
            channel = source // 2 * 3 + output
            steps[source, output] = layer.weight_quantizer.scale[channel] / factor[channel]
    freezing = Freezing(prepared, 20, thresholds=(0.2, 0.2), momentum=0.15)
    weights = layer.weight.detach().clone()
    for step in range(20):
        with torch.no_grad():
            layer.weight.copy_(weights + (step % 2) * steps)
        freezing.step()
    state = freezing.state_dict()["weights"]["0.weight"]
    moved = state["frozen"]
    assert moved.float().mean() > 0.5
    torch.testing.assert_close(layer.weight.detach()[moved], (state["codes"] * steps)[moved], rtol=1e-5, atol=1e-7)
    error = (weights / steps).round().clamp(-8, 7) * steps - (weights / steps).clamp(-8, 7) * steps
    with torch.no_grad():
        layer.weight.copy_(weights)
    loss = at_end(Dampening(prepared, 1, largest=1.0))()
    torch.testing.assert_close(loss.detach(), error.square().sum() / 18, rtol=1e-4, atol=1e-8)


# ---- a toy that oscillates: the best weight lies between two codes, and the straight-through gradient never vanishes


def toy(best: float, steps: int, freeze: bool = True, dampen: float = 0.0) -> tuple[list[float], Any]:
    """Train y = w x on y = best x by SGD on the grid of integers; return the quantized weight in each forward."""
    model = replaced(nn.Linear(1, 1, bias=False), qt.QuantSpec(bits=4, quantizer="lsq"))
    weight = nn.init.constant_(model[0].weight, 2.05)
    model[0].weight_quantizer.amax = 7.0
    optimizer = torch.optim.SGD([weight], 0.1)
    freezing = Freezing(model, steps, **({} if freeze else {"thresholds": None}))
    dampening = Dampening(model, steps, largest=dampen)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(torch.ones(1, 1))
        seen.append(y.item())
        ((y - best).square().sum() + dampening()).backward()
        optimizer.step()
        freezing.step()
        dampening.step()
    return seen, freezing


@pytest.mark.parametrize("best", [2.3, 2.7])
def test_without_freezing_the_weight_oscillates_with_the_mean_of_the_best(best: float) -> None:
    seen, freezing = toy(best, 400, freeze=False)
    assert set(seen[100:]) == {2.0, 3.0}
    assert sum(seen[100:]) / 300 == pytest.approx(best, abs=0.02)
    turns = sum(a != b for a, b in pairwise(seen))
    assert turns > 100
    assert freezing.report().oscillating == 1
    assert freezing.report().frozen == 0
    assert freezing.threshold is None


@pytest.mark.parametrize(("best", "code"), [(2.3, 2.0), (2.7, 3.0)])
def test_freezing_keeps_the_code_that_the_weight_has_most_of_the_time(best: float, code: float) -> None:
    seen, freezing = toy(best, 400)
    assert set(seen[300:]) == {code}
    report = freezing.report()
    assert (report.oscillating, report.frozen) == (0, 1)
    assert freezing._weights["0.weight"].parameter.item() == code


def test_dampening_keeps_the_weight_in_the_middle_of_its_code() -> None:
    seen, freezing = toy(2.3, 400, freeze=False, dampen=5.0)
    assert len(set(seen[:100])) == 2, "the weight oscillates while the coefficient of the dampening loss is small"
    assert len(set(seen[300:])) == 1
    assert abs(freezing._weights["0.weight"].parameter.item() - seen[-1]) < 0.3


def test_an_average_of_codes_from_long_ago_does_not_choose_the_code() -> None:
    model = replaced(nn.Linear(1, 1, bias=False), qt.QuantSpec(bits=4, quantizer="lsq"))
    model[0].weight_quantizer.amax = 7.0
    freezing = Freezing(model, 1000)
    for step in range(200):
        with torch.no_grad():
            model[0].weight.fill_(-7.0 if step < 100 else 5.0 + step % 2)
        freezing.step()
    assert freezing.state_dict()["weights"]["0.weight"]["average"].item() < 0
    assert freezing.report().frozen == 1
    assert model[0].weight.item() == 5


@each_quantizer
@each_route
def test_frozen_weights_keep_their_codes_until_the_deployed_model(route: str, quantizer: str) -> None:
    model = net(route, quantizer)
    freezing, dampening, optimizer = Freezing(model, 60, **EAGER), Dampening(model, 60), sgd(model)
    train(model, optimizer, freezing, dampening, 30)
    before = freezing.state_dict()["weights"]
    train(model, optimizer, freezing, dampening, 30)
    after = freezing.state_dict()["weights"]
    converted = qt.convert(copy.deepcopy(model).eval())
    for name in ("stem", "conv", "fc"):
        then, now = before[f"{name}.weight"], after[f"{name}.weight"]
        kept = then["frozen"]
        assert kept.any()
        assert torch.equal(now["codes"][kept], then["codes"][kept])
        assert now["frozen"][kept].all()
        layer: Any = converted.get_submodule(name)
        codes = layer.weight_quantizer.codes(layer.weight)
        live = torch.ones(len(codes), dtype=torch.bool)
        if name == "conv":
            live = model.get_submodule("bn").weight.detach() != 0  # a channel of gamma 0 is folded to zeros
        mine = now["frozen"] & live.view(-1, *[1] * (codes.dim() - 1))
        assert torch.equal(codes[mine].int(), now["codes"][mine])


def depthwise(axis: int | None, quantizer: str) -> Any:
    torch.manual_seed(0)
    parts = [nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1)]
    spec = qt.QuantSpec(bits=4, axis=axis, quantizer=quantizer)
    model = nn.Sequential(*parts).train()
    return qt.prepare(
        model, qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(None, spec)), backend="tensorrt10"
    )


@each_quantizer
def test_a_channel_that_is_frozen_as_a_whole_leaves_its_statistics_where_they_are(quantizer: str) -> None:
    """If a frozen weight took the factor, the variance that the weight gives would grow or vanish exponentially."""
    model = depthwise(0, quantizer)
    layer, bn = model.get_submodule("0"), model.get_submodule("1")
    optimizer, freezing = torch.optim.SGD(model.parameters(), 0.01), Freezing(model, 300, **EAGER)
    x = 3 * torch.randn(8, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    freezing.step()
    freezing.state_dict()["weights"]["0.weight"]["frozen"].fill_(True)
    freezing.step()
    weight, begun = layer.weight.detach().clone(), False
    for _ in range(150):
        optimizer.zero_grad()
        (model(x) - x[:, :3, 1:-1, 1:-1]).square().mean().backward()
        optimizer.step()
        freezing.step()
        begun = begun or bool((bn.running_var / 9 - 1).abs().max() > 0.5)
    assert begun, "the variance was another one at the beginning"
    of_batch = F.conv2d(x, layer.weight, groups=6).var((0, 2, 3))
    torch.testing.assert_close(bn.running_var, of_batch.detach(), rtol=0.02, atol=0)
    if quantizer == "fixed":
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("axis", "quantizer"), [(None, "lsq"), (0, "tqt")])
def test_scales_that_cannot_take_the_factor_of_each_channel_are_left_out(axis: int | None, quantizer: str) -> None:
    model = depthwise(axis, quantizer)
    freezing = Freezing(model, 10)
    freezing.step()
    assert [layer.name for layer in freezing.report().layers] == ["3.weight"]
    assert "its scale cannot follow the factor of each: give its QuantSpec axis=0" in freezing.skipped["0.weight"]
    tracking = Freezing(model, 10, thresholds=None)
    tracking.step()
    assert [layer.name for layer in tracking.report().layers] == ["0.weight", "3.weight"]


# ---- resumed


def same_tracks(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["steps"] == other["steps"]
    assert one["weights"].keys() == other["weights"].keys()
    for name, track in one["weights"].items():
        for key, value in track.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["weights"][name][key])), (name, key)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", [0, 1, 7, 15])
@each_quantizer
@each_route
def test_a_resumed_training_goes_on_bit_for_bit(route: str, quantizer: str, at: int) -> None:
    fresh = net(route, quantizer)
    model = copy.deepcopy(fresh)
    parts = model, sgd(model), Freezing(model, 20, **EAGER, begin=2), Dampening(model, 20)
    train(*parts, at)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    resumed = fresh, sgd(fresh), Freezing(fresh, 20, **EAGER, begin=2), Dampening(fresh, 20)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for each in (parts, resumed):
        train(*each, 20 - at)
    assert parts[2].report() == resumed[2].report()
    assert parts[2].report().frozen > 0
    assert repr(parts[3]) == repr(resumed[3])
    one, other = model.state_dict(), fresh.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    same_tracks(parts[2].state_dict(), resumed[2].state_dict())


def test_a_state_is_not_changed_by_later_steps() -> None:
    model, layer = of_grid("tensor")
    freezing = Freezing(model, 40, **EAGER)
    freezing.step()
    state = freezing.state_dict()
    kept = copy.deepcopy(state)
    for step in range(20):
        with torch.no_grad():
            layer.weight.mul_(2.0 if step % 2 else 0.5)
        freezing.step()
    assert freezing.report().frozen > 0
    same_tracks(state, kept)


def test_the_state_of_another_model_is_refused() -> None:
    model, _ = of_grid("tensor")
    other = replaced(nn.Linear(4, 4), qt.QuantSpec(bits=4))
    freezing = Freezing(other, 10)
    freezing.step()
    with pytest.raises(ValueError, match=r"its '0.weight' has shape \(4, 4\), but this model's has \(6, 8\)"):
        Freezing(model, 10).load_state_dict(freezing.state_dict())
    two = Freezing(
        qt.quant_modules.replace(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), mapping(4), backend="tensorrt10"), 10
    )
    with pytest.raises(
        ValueError, match=r"unknown weight in the state of OscillationFreezing '0.weight'; did you mean"
    ):
        two.load_state_dict(freezing.state_dict())


# ---- which weights


def mapping(bits: int) -> qt.QConfigMapping:
    return qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=bits, axis=0)))


class Tied(nn.Module):
    """Two layers with one weight, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.table.weight
        self.first = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.first(self.table(x))))


def test_a_shared_weight_is_handled_once() -> None:
    model: Any = qt.quant_modules.replace(Tied().train(), mapping(3), backend="tensorrt10")
    assert isinstance(model.table, QuantWeighted)
    assert isinstance(model.head, QuantWeighted)
    assert model.head.weight is model.table.weight
    freezing, dampening = Freezing(model, 10), at_end(Dampening(model, 10, largest=1.0))
    freezing.step()
    assert [layer.name for layer in freezing.report().layers] == ["table.weight", "first.weight"]
    assert freezing.skipped == dampening.skipped == {"head.weight": "it is the same parameter as table.weight"}
    alone = [at_end(Dampening(part, 10, largest=1.0))() for part in (model.table, model.first)]
    torch.testing.assert_close(dampening(), alone[0] + alone[1])


def test_quantizers_that_are_off_are_left_alone_until_they_are_on() -> None:
    model = net("graph", "fixed")
    freezing, dampening = Freezing(model, 10), at_end(Dampening(model, 10))
    with qt.disable_quantization(model):
        freezing.step()
        assert dampening().item() == 0
        assert freezing.report().layers == ()
        assert "conv.weight: skipped: it is not quantized yet" in str(freezing.report())
        assert freezing.state_dict() == {"steps": 1, "weights": {}}
    model.get_submodule("fc.weight_quantizer").disable()
    assert dampening().item() > 0
    freezing.step()
    assert [layer.name for layer in freezing.report().layers] == ["stem.weight", "conv.weight"]
    assert freezing.report().skipped == {"fc.weight": "it is not quantized yet"}


def test_a_schedule_that_observes_first() -> None:
    model = qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 3)).train(), mapping(3), backend="tensorrt10")
    schedule, freezing = qt.tuning.QuantizationSchedule(model, observe=2), Freezing(model, 10)
    for step in range(4):
        model(torch.randn(5, 4)).sum().backward()
        schedule.step()
        freezing.step()
        assert len(freezing.report().layers) == (step >= 1)


class Kinds(nn.Module):
    """Weights of a function, of a pruned layer, and of formats without plain grids."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.pruned, self.dorefa, self.small, self.wide = (nn.Linear(4, 4) for _ in range(5))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        prune.l1_unstructured(self.pruned, "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.plain(x), self.matrix)
        return self.wide(self.small(self.dorefa(self.pruned(x))))


def test_other_weights_are_named_with_the_reason() -> None:
    of = mapping(3)
    for name, spec in {
        "dorefa": qt.QuantSpec(bits=3, axis=None, quantizer="dorefa"),
        "small": qt.QuantSpec(bits=8, axis=None, format="e4m3"),
        "wide": qt.QuantSpec(bits=8),
    }.items():
        of.set_module_name(name, qt.QConfig(None, spec))
    model = qt.prepare(Kinds().train(), (torch.zeros(2, 4),), qconfig_mapping=of, backend="tensorrt10")
    freezing = Freezing(model, 10)
    freezing.step()
    assert [layer.name for layer in freezing.report().layers] == ["plain.weight"]
    assert freezing.skipped == {
        "pruned.weight": "it is computed from others (pruned or parametrized); make it plain with torch.nn.utils first",
        "dorefa.weight": "it is quantized as int3 dorefa, which is not a plain integer grid",
        "small.weight": "it is quantized as e4m3, which is not a plain integer grid",
        "wide.weight": "it has 8 bits, more than max_bits=4",
        "weight_quantizers.linear": "it quantizes the weight of a function; use a layer, which owns its weight",
    }
    assert "wide.weight: skipped: it has 8 bits" in str(freezing.report())
    assert "wide.weight" not in Dampening(model, 10).skipped


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.LSTM(4, 4, bidirectional=True), ["ih_l0", "hh_l0", "ih_l0_reverse", "hh_l0_reverse"]),
        (lambda: nn.GRUCell(4, 4), ["ih", "hh"]),
    ],
)
def test_a_layer_with_several_weights(make: Callable[[], nn.Module], names: list[str]) -> None:
    torch.manual_seed(0)
    model = qt.quant_modules.replace(nn.Sequential(make()).train(), mapping(3), backend="tensorrt10")
    freezing = Freezing(model, 10)
    freezing.step()
    assert [layer.name for layer in freezing.report().layers] == [f"0.weight_{name}" for name in names]
    expected = 0.0
    for name in names:
        weight = model.get_parameter(f"0.weight_{name}").detach()
        quotient = weight / weight.abs().amax(1, keepdim=True) * 3
        error = (quotient - quotient.round()) * weight.abs().amax(1, keepdim=True) / 3
        expected += float(error.square().sum() / 4)
    assert at_end(Dampening(model, 1, largest=1.0))().item() == pytest.approx(expected, rel=1e-4)


def test_a_model_without_such_weights_is_refused() -> None:
    with pytest.raises(
        ValueError, match="OscillationFreezing: the model has no weight with an integer grid; pass the result"
    ):
        Freezing(nn.Linear(4, 4), 10)
    eight = qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 3)).train(), mapping(8), backend="tensorrt10")
    words = r"of at most max_bits=4 bits \(0.weight: it has 8 bits, more than max_bits=4\). Raise max_bits, or give the layers"
    with pytest.raises(ValueError, match=words):
        Freezing(eight, 10)
    assert Freezing(eight, 10, max_bits=8).skipped == {}
    with pytest.raises(ValueError, match="0.weight: it is converted, so it is not trained"):
        Dampening(qt.convert(eight.eval()), 10)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"total_steps": 1.5}, TypeError, "total_steps must be a whole number, got 1.5"),
        ({"total_steps": 0}, ValueError, "total_steps must be at least 1, got 0"),
        ({"begin": -1}, ValueError, "begin must be at least 0, got -1"),
        ({"begin": 10}, ValueError, "begin must be less than total_steps=10, got 10"),
        ({"momentum": 0}, ValueError, "momentum must be between 0 and 1, got 0"),
        ({"momentum": "0.1"}, TypeError, "momentum must be a number, got '0.1'"),
        ({"thresholds": 0.1}, TypeError, r"thresholds must be two numbers, such as \(0.1, 0.01\), or None, got 0.1"),
        ({"thresholds": (0.1, True)}, TypeError, "each of thresholds must be a number, got True"),
        ({"thresholds": (0.01, 0.1)}, ValueError, r"thresholds must decrease, from at most 1, got \(0.01, 0.1\)"),
        ({"thresholds": (2.0, 0.1)}, ValueError, "thresholds must decrease, from at most 1"),
        (
            {"momentum": 0.02},
            ValueError,
            r"thresholds must be above momentum=0.02, or a single flip .* \(0.1, 0.01\); lower",
        ),
        ({"max_bits": 1}, ValueError, "max_bits must be at least 2, got 1"),
        ({"model": "model"}, TypeError, "model must be a torch.nn.Module, got str"),
    ],
)
def test_arguments_of_freezing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"model": of_grid("tensor")[0], "total_steps": 10, **options}
    with pytest.raises(error, match=f"^OscillationFreezing: {words}"):
        Freezing(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"largest": -0.1}, ValueError, "largest must be at least 0 and finite, got -0.1"),
        ({"largest": math.inf}, ValueError, "largest must be at least 0 and finite, got inf"),
        ({"largest": math.nan}, ValueError, "largest must be at least 0 and finite, got nan"),
        ({"largest": None}, TypeError, "largest must be a number, got None"),
        ({"begin": 11}, ValueError, "begin must be less than total_steps"),
        ({"model": None}, TypeError, "model must be a torch.nn.Module, got NoneType"),
    ],
)
def test_arguments_of_dampening(options: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"model": of_grid("tensor")[0], "total_steps": 10, **options}
    with pytest.raises(error, match=f"^OscillationDampening: {words}"):
        Dampening(**arguments)


def test_a_compiled_model_has_the_names_of_the_model() -> None:
    model = net("graph")
    plain, compiled = Freezing(model, 10), Freezing(torch.compile(model, backend="eager"), 10)
    plain.step()
    compiled.load_state_dict(plain.state_dict())
    assert compiled.report() == plain.report()


class NoWait(TorchDispatchMode):
    """Raises where a step would wait for the device: for the value of a tensor, or a result whose size depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@each_quantizer
def test_a_step_does_not_wait_for_the_device(quantizer: str) -> None:
    model = net("graph", quantizer)
    freezing, dampening = Freezing(model, 10, **EAGER), Dampening(model, 10)
    with NoWait():
        for _ in range(3):
            dampening().backward()
            freezing.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        freezing.report()


# ---- two processes


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = net("graph", "fixed")
    wrapped = DistributedDataParallel(model)
    freezing, dampening, optimizer = Freezing(wrapped, 30, **EAGER), Dampening(wrapped, 30), sgd(model)
    for i in range(30):
        optimizer.zero_grad()
        (task(wrapped, 2 * i + rank) + dampening()).backward()
        optimizer.step()
        freezing.step()
        dampening.step()
    sharded = net("graph", "fixed")
    fully_shard(sharded)
    with pytest.raises(ValueError, match="stem.weight: it is sharded over processes; train in DistributedDataParallel"):
        Freezing(sharded, 10)
    state = {"freezing": freezing.state_dict(), "model": model.state_dict()}
    torch.save(state, Path(folder) / f"{rank}.pt")


@pytest.mark.slow
def test_all_ranks_freeze_the_same_weights_at_the_same_values(tmp_path) -> None:
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    processes.spawn(work, (str(tmp_path),), 2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert not torch.equal(one["model"]["bn.running_var"], other["model"]["bn.running_var"]), "of their own data"
    same_tracks(one["freezing"], other["freezing"])
    for name, track in one["freezing"]["weights"].items():
        assert torch.equal(one["model"][name], other["model"][name]), name
        assert track["frozen"].any(), name
