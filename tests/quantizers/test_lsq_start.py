"""The start of learned scales: scale = 2 * mean|x| / sqrt(qmax), at most the scale of the observed range."""

import copy
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.quantizers.observers import LSQStartObserver
from qtoolkit.quantizers.table import QUANTIZERS
from qtoolkit.quantizers.weights import weight_quantizer


def observed(spec: qt.QuantSpec, *inputs: Tensor, group: int = 1) -> qt.TensorQuantizer:
    quantizer = qt.TensorQuantizer(spec, group=group)
    with qt.calibrating(quantizer):
        for x in inputs:
            quantizer(x)
    return quantizer


def lsq(bits: int = 2, observer: str = "lsq", **fields: object) -> qt.QuantSpec:
    """Return a spec that starts as the paper does, or from another observer."""
    return qt.QuantSpec(bits=bits, quantizer="lsq", observer=observer, **fields)


X = torch.randn(8, 6, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 3, 6).view(6, 1, 1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("fields", "group", "mean"),
    [
        ({}, 1, lambda m: m.mean()),
        ({"axis": 0}, 1, lambda m: m.mean((1, 2, 3))),
        ({"axis": 1}, 1, lambda m: m.mean((0, 2, 3))),
        ({"axis": -3}, 1, lambda m: m.mean((0, 2, 3))),
        ({"axis": 1}, 2, lambda m: m.unflatten(0, (2, 4)).mean((1, 3, 4)).flatten()),
        ({"axis": 1, "group_size": 3}, 1, lambda m: m.unflatten(1, (2, 3)).mean(2)),
    ],
)
def test_the_start_is_the_papers(bits: int, fields: dict, group: int, mean) -> None:
    spec = lsq(bits, **fields)
    widest = observed(qt.QuantSpec(bits=bits, **fields), X, group=group).scale
    wanted = torch.minimum(2 * mean(X.abs()) / spec.qmax**0.5, widest)
    assert bits > 2 or (wanted < widest).any()
    torch.testing.assert_close(observed(spec, X, group=group).scale, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_an_affine_start_keeps_the_zero_point(signed: bool) -> None:
    for x in (torch.randn(999).relu(), torch.randn(999) + 1, -torch.rand(999)):
        spec, fixed = lsq(signed=signed, symmetric=False), qt.QuantSpec(bits=2, signed=signed, symmetric=False)
        quantizer, whole = observed(spec, x), observed(fixed, x)
        assert torch.equal(quantizer.zero_point, whole.zero_point)
        wanted = torch.minimum(2 * x.abs().mean() / spec.qmax**0.5, whole.scale)
        torch.testing.assert_close(quantizer.scale, wanted, rtol=1e-6, atol=0)


def test_the_mean_is_that_of_all_batches_and_ranks() -> None:
    parts = (X[:1], X[1:1], X[1:6], X[6:])
    for axis in (None, 1):
        whole, split = observed(lsq(axis=axis), X), observed(lsq(axis=axis), *parts)
        torch.testing.assert_close(split.scale, whole.scale, rtol=1e-7, atol=0)
        ranks = [observed(lsq(axis=axis), part) for part in (X[:3], X[3:])]
        ranks[0].merge_observed([rank.observer.state() for rank in ranks])
        ranks[0].load_observed()
        torch.testing.assert_close(ranks[0].scale, whole.scale, rtol=1e-7, atol=0)
        split.observer.reset()
        split.observer(X)
        split.load_observed()
        assert torch.equal(split.scale, whole.scale)


@pytest.mark.parametrize("observer", ["moving_average", "histogram"])
def test_another_observer_keeps_its_start(observer: str) -> None:
    spec = lsq(observer=observer)
    assert torch.equal(observed(spec, X).scale, observed(qt.QuantSpec(bits=2, observer=observer), X).scale)
    assert type(qt.TensorQuantizer(lsq()).observer) is LSQStartObserver


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("axis", [None, 1])
def test_the_default_start_has_the_least_squared_error(bits: int, of_weight: bool, axis: int | None) -> None:
    """No scale of a fine search has a clearly smaller one; with eight bits a code has only a few bins of the histogram."""
    spec = qt.QuantSpec(bits=bits, quantizer="lsq", axis=axis)
    quantizer = qt.TensorQuantizer(spec, 6 if axis else None, of_weight=of_weight)
    with qt.calibrating(quantizer):
        quantizer(X)

    def error(scale: Tensor) -> Tensor:
        rounded = qt.ops.fake_quant(X, scale, None, spec.qmin, spec.qmax, axis)
        return (rounded - X).square().mean((0, 2, 3) if axis else None)

    searched = torch.stack([error(quantizer.scale * share) for share in torch.linspace(0.5, 1.5, 101)]).amin(0)
    assert bool((error(quantizer.scale) <= (1.03 if bits < 8 else 1.5) * searched).all())
    paper = observed(lsq(bits, axis=axis), X).scale
    assert bool((error(quantizer.scale) <= 1.001 * error(paper)).all())


LEARNED = [name for name, kind in QUANTIZERS.items() if kind.LEARNED]


@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("quantizer", LEARNED)
def test_all_that_is_trained_starts_there(quantizer: str, of_weight: bool) -> None:
    """From the largest value, ResNet-20 in two bits ended 16 to 50 points lower."""
    affine, pow2 = quantizer in ("lsq_plus", "learned_range"), quantizer == "tqt"
    spec = qt.QuantSpec(bits=3, quantizer=quantizer, symmetric=not affine, pow2_scale=pow2)
    found, searched = (
        qt.TensorQuantizer(of, None, of_weight=of_weight) for of in (spec, replace(spec, observer="histogram"))
    )
    for each in (found, searched):
        with qt.calibrating(each):
            each(X)
    assert torch.equal(found(X), searched(X))
    assert found(X).max() < X.max()


@pytest.mark.parametrize("quantizer", ["pact", "learned_range", "dsq"])
def test_a_bound_has_a_gradient_from_the_start(quantizer: str) -> None:
    affine = quantizer == "learned_range"
    spec = qt.QuantSpec(bits=2, signed=False, quantizer=quantizer, symmetric=not affine)
    for each, moves in ((spec, True), (replace(spec, observer="moving_average"), False)):
        found = observed(each, X.relu())
        found(X.relu()).sum().backward()
        bound = found._relative_high if affine else found._relative_bound
        assert bool(bound.grad.abs() > 1) == moves


@pytest.mark.parametrize("x", [torch.zeros(4), torch.full((4,), 3.0)], ids=["zeros", "constant"])
def test_odd_inputs_have_a_positive_scale(x: Tensor) -> None:
    for symmetric in (True, False):
        assert 0 < observed(lsq(symmetric=symmetric), x).scale < 10


def test_blocks_start_as_in_the_paper() -> None:
    spec = qt.QuantSpec(bits=4, quantizer="lsq", axis=1, group_size=3)
    assert type(qt.TensorQuantizer(spec).observer) is LSQStartObserver


def test_a_loaded_range_is_that_of_all_inputs() -> None:
    one, other = observed(lsq(), X), qt.TensorQuantizer(lsq())
    assert "observer.total" not in one.state_dict()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.scale, one.scale)  # loaded, not started anew
    other.load_observed()
    torch.testing.assert_close(other.amax, X.abs().max())


def test_casts_and_copies_keep_the_mean() -> None:
    quantizer = observed(lsq(axis=1), X)
    for copied in (copy.deepcopy(quantizer), copy.deepcopy(quantizer).half()):
        copied.load_observed()
        assert torch.equal(copied.scale, quantizer.scale)


class Net(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.train().parameters(), lr, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def two_bits_after(observer: str, args: dict, seed: int) -> float:
    """Return the accuracy on digits of a float model trained further in two bits, on any processor."""
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    model = Net()
    train(model, x[:1200], y[:1200], 15, 0.05)
    activation = lsq(signed=False, symmetric=False, observer=observer, observer_args=args)
    config = qt.QConfig(activation, lsq(axis=0, observer=observer, observer_args=args))
    mapping = qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(model, backend="onnxruntime", qconfig_mapping=mapping, training_arithmetic="float")
    qt.calibrate(prepared, [x[:1200]], progress=False)
    torch.manual_seed(seed)
    train(prepared, x[:1200], y[:1200], 3, 0.01)
    return (prepared.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean().item()


@pytest.mark.slow
def test_two_bits_train_further_than_from_the_observed_range() -> None:
    """On average: single trainings end up to 0.06 apart, by the rounding of their sums alone."""
    observed = {"minmax": {}, "moving_average": {"momentum": 1.0}}  # one batch: the observed range
    found = {name: [two_bits_after(name, args, seed) for seed in range(3)] for name, args in observed.items()}
    assert sum(found["minmax"]) > sum(found["moving_average"]) + 3 * 0.02, found


def paper_step(x: Tensor, g: Tensor, spec: qt.QuantSpec, multiplier: float, rate: float) -> tuple[Tensor, Tensor]:
    """Return the scale before and after a step of SGD on the paper's parameter, a scale for x, in float64.

    x times the multiplier is quantized, with a scale that is a constant times the parameter; g is the gradient of the result.
    """
    x, g = x.double(), g.double()
    paper = 2 * x.abs().mean() / spec.qmax**0.5
    whole = (x * multiplier).abs().max() / spec.qmax
    scale = torch.minimum(whole / paper, torch.tensor(multiplier)) * paper
    parameter = torch.maximum(paper, scale / multiplier * spec.qmax / (x.numel() * spec.qmax) ** 0.25)
    constant = scale / parameter
    ratio = x * multiplier / scale
    codes = ratio.round().clamp(spec.qmin, spec.qmax)
    inside = (ratio.round() >= spec.qmin) & (ratio.round() <= spec.qmax)
    gradient = (g * torch.where(inside, codes - ratio, codes)).sum() * (x.numel() * spec.qmax) ** -0.5
    return scale, constant * (parameter - rate * constant * gradient)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_start_below_the_papers_trains_as_the_papers_scale(bits: int) -> None:
    x, g, spec = torch.randn(4, 30), torch.randn(4, 30), lsq(bits)
    quantizer = weight_quantizer(x, spec, "layer")
    before, after = paper_step(x, g, spec, 1.0, 0.01)
    assert torch.allclose(quantizer.scale.double(), before, rtol=1e-5)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.01)
    quantizer.train()(x).backward(g)
    optimizer.step()
    torch.testing.assert_close((quantizer.scale - before).double(), after - before, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("gamma", [0.03, 5.0])
def test_a_weight_that_a_batch_norm_multiplies_trains_as_the_weight_itself(bits: int, gamma: float) -> None:
    conv, bn = nn.Conv2d(3, 2, 3, bias=False), nn.BatchNorm2d(2)
    nn.init.constant_(bn.weight, gamma)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, lsq(bits, axis=0)))
    model = qt.prepare(
        nn.Sequential(conv, bn), (torch.randn(2, 3, 8, 8),), qconfig_mapping=mapping, backend="tensorrt10"
    ).train()
    quantizer, x = model.get_submodule("0").weight_quantizer, torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.5)
    before = quantizer.scale.detach().clone()
    model(x).square().sin().sum().backward()
    optimizer.step()

    w, qmax, factor = conv.weight.detach(), quantizer.spec.qmax, gamma / (1 + bn.eps) ** 0.5
    paper = 2 * w.abs().mean((1, 2, 3)) / qmax**0.5
    start = torch.minimum(w.abs().amax((1, 2, 3)) / qmax, paper)
    parameter = torch.maximum(paper, start * qmax / (27 * qmax) ** 0.25).requires_grad_()
    constant = start * factor / parameter.detach()
    scale = constant * parameter
    torch.testing.assert_close(before, scale.detach(), rtol=1e-5, atol=0)
    quantized = qt.ops.fake_quant(w * factor, scale, None, -qmax - 1, qmax, 0, grad_factor=(27 * qmax) ** -0.5)
    y = F.batch_norm(F.conv2d(x, quantized / factor), None, None, bn.weight, bn.bias, training=True)
    y.square().sin().sum().backward()
    wanted = constant * (parameter.detach() - 0.5 * parameter.grad)
    torch.testing.assert_close(quantizer.scale - before, wanted.abs() - before, rtol=2e-3, atol=1e-7)


def growths_and_loss(rates: bool) -> tuple[Tensor, float]:
    """Train a net of eight bits on digits; return how many times their start the scales are, and the last loss."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    mapping = qt.QConfigMapping().set_global(qt.QConfig(lsq(8), lsq(8, axis=0)))
    model = qt.prepare(net, (x[:2],), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(model, x[:256].split(64), progress=False)
    quantizers = list(qt.quantizers_of(model).values())
    if not rates:
        for quantizer in quantizers:
            quantizer.get_buffer("_rate").fill_(1)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    for batch in torch.randperm(len(x))[:1600].split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return torch.cat([quantizer.kind.growth(quantizer).flatten() for quantizer in quantizers]), float(loss.detach())


def test_scales_stay_near_a_good_start_at_a_high_learning_rate() -> None:
    (growth, loss), (wild, _) = growths_and_loss(rates=True), growths_and_loss(rates=False)
    assert growth.max() < 30
    assert wild.max() > 100  # 200 to 6,000, by processor; its loss is a matter of rounding
    assert loss < 0.1


@pytest.mark.parametrize("observer", ["minmax", "lsq"])
@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38, 1e-39])
def test_tiny_weights_train(observer: str, size: float) -> None:
    """Their scales, or the reciprocals of these, are at the ends of float32."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)).train()
    with torch.no_grad():
        model[0].weight.mul_(size)
    spec, x = qt.QuantSpec(quantizer="lsq", observer=observer), torch.randn(16, 8)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, replace(spec, axis=0)))
    prepared = qt.prepare(model, (x,), "academic", mapping)
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.SGD(qt.parameter_groups(prepared, 0.01), momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (prepared(x) - 1).square().mean().backward()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in prepared.parameters())
