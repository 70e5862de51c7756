"""The start of learned scales: scale = 2 * mean|x| / sqrt(qmax), at most the scale of the observed range."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.quantizers.observers import LSQStartObserver


def observed(spec: qt.QuantSpec, *inputs: Tensor, group: int = 1) -> qt.TensorQuantizer:
    quantizer = qt.TensorQuantizer(spec, group=group)
    with qt.calibrating(quantizer):
        for x in inputs:
            quantizer(x)
    quantizer.load_observed()
    return quantizer


def lsq(bits: int = 2, **fields: object) -> qt.QuantSpec:
    return qt.QuantSpec(bits=bits, quantizer="lsq", **fields)


X = torch.randn(8, 6, 4, 4) * torch.linspace(1, 3, 6).view(6, 1, 1)


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


@pytest.mark.parametrize("x", [torch.zeros(4), torch.full((4,), 3.0)], ids=["zeros", "constant"])
def test_odd_inputs_have_a_positive_scale(x: Tensor) -> None:
    for symmetric in (True, False):
        assert 0 < observed(lsq(symmetric=symmetric), x).scale < 10


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


def test_two_bits_train_further_than_from_the_observed_range() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    model = Net()
    train(model, x[:1200], y[:1200], 15, 0.05)
    found = {}
    for observer, args in (("minmax", {}), ("moving_average", {"momentum": 1.0})):  # one batch: the observed range
        activation = lsq(signed=False, symmetric=False, observer=observer, observer_args=args)
        mapping = qt.QConfigMapping().set_global(
            qt.QConfig(activation, lsq(axis=0, observer=observer, observer_args=args))
        )
        prepared = qt.prepare(
            model, backend="onnxruntime", qconfig_mapping=mapping, forward="float"
        )  # on any processor
        qt.calibrate(prepared, [x[:1200]], progress=False)
        torch.manual_seed(0)
        train(prepared, x[:1200], y[:1200], 3, 0.01)
        found[observer] = (prepared.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean().item()
    assert found["minmax"] > found["moving_average"] + 0.05, found
