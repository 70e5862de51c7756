"""Grids that a target fixes, and ops with one grid for input and output: what LiteRT's specification asks for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qtoolkit as qt
from tests.graph.placement.test_needs_quantized_output import Probe

Op = Callable[[Tensor], Tensor]


def grids(op: Callable[[Tensor, Tensor], Tensor]) -> dict[str, tuple[float, float]]:
    """Return scale and zero point of each activation quantizer of an op between convolutions, on the backend "litert"."""
    x = 3 * torch.randn(2, 4, 8, 8)
    prepared = qt.prepare(Probe(lambda probe, y, x: op(y, x)).eval(), x, "litert")
    qt.calibrate(prepared, [x], progress=False)
    found = qt.quantizers_of(prepared).items()
    of_activations = {name.rpartition(".")[2]: q for name, q in found if name.startswith("activation_quantizers.")}
    return {name: (float(q.scale), float(q.zero_point)) for name, q in of_activations.items()}


@pytest.mark.parametrize(
    ("op", "name", "grid"),
    [
        (torch.sigmoid, "sigmoid", (1 / 256, -128)),
        (lambda x: F.softmax(x, 1), "softmax", (1 / 256, -128)),
        (torch.tanh, "tanh", (1 / 128, 0)),
        (lambda x: F.avg_pool2d(torch.tanh(x), 2), "tanh", (1 / 128, 0)),
    ],
)
def test_the_grids_of_some_outputs_are_fixed(op: Op, name: str, grid: tuple[float, float]) -> None:
    assert grids(lambda y, x: op(y))[name] == grid


def test_a_fixed_grid_is_not_that_of_other_tensors_of_one_scale() -> None:
    found = grids(lambda y, x: torch.cat([torch.sigmoid(y), x], 1)[:, :4])
    assert list(found) == ["cat", "first", "last"]
    assert found["cat"][0] > 1 / 128  # of x too, which is beyond 3


@pytest.mark.parametrize(
    "op",
    [
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: x.mean((2, 3), keepdim=True),
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2),
    ],
)
def test_pools_and_resizes_have_the_grid_of_their_input(op: Op) -> None:
    assert list(grids(lambda y, x: op(y))) == ["x", "first", "last"]


def test_a_mean_has_a_grid_of_its_own() -> None:
    assert list(grids(lambda y, x: y.mean(1, keepdim=True).expand(-1, 4, -1, -1))) == ["x", "first", "mean", "last"]


def test_an_activation_that_joins_nothing_is_an_op() -> None:
    assert list(grids(lambda y, x: F.leaky_relu(y))) == ["x", "first", "leaky_relu", "last"]
    assert list(grids(lambda y, x: torch.relu(y))) == ["x", "relu", "last"]


def test_the_range_of_a_constant_observer_holds_zero() -> None:
    with pytest.raises(ValueError, match="must hold zero, with low below high, got low=1.0 and high=2.0"):
        qt.QuantSpec(observer="constant", observer_args={"low": 1.0, "high": 2.0})
