"""CUDA kernels of the shaped quantizers and of PReLU, executed on the CPU in three orders of their threads, against its own."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Channels, assert_same, floats
from tests.ops import cuda_host
from tests.ops.cuda_host import ORDERS, Levels, channels, compiled, dtype_number
from tests.ops.test_cuda_host import SHAPES, STRIDED, arithmetic, dtypes, like, shapes
from tests.ops.test_shaped import KINDS, arguments, kinds

native = torch.ops.qtoolkit
FORWARD = {"levels": "to_levels", "interval": "to_interval"}
BACKWARD = {"clip": "clipped_backward", "levels": "levels_backward", "interval": "interval_backward"}


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return compiled()


def of_levels(levels: list[int]) -> Levels:
    return Levels(len(levels), (ctypes.c_float * 32)(*levels))


def case(shape: str, kind: str, dtype: torch.dtype, layout: str) -> tuple[Tensor, dict, dict[str, Any]]:
    """The input, the arguments of the op, and the fields of KernelArgs."""
    sizes, *cut = SHAPES[shape]
    x = STRIDED[layout](floats(dtype)(*sizes))
    given = arguments(kind, x, Channels(*cut), arithmetic(dtype))
    fields = {
        "numel": x.numel(),
        "channels": channels(*SHAPES[shape]),
        "x": x,
        "y_dtype": dtype_number(x),
        "scale": given["scale"],
        "zero_point": given["zero_point"],
        "bounds": (given["qmin"], given["qmax"]),
        "fractional": given["shape"] == "interval",
        "levels": of_levels(given.get("levels", [])),
    }
    return x, given, {name: value for name, value in fields.items() if value is not None}


@pytest.mark.sweep(2)
@dtypes
@shapes
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]["shape"] in FORWARD])
@pytest.mark.parametrize("layout", ["dense", "every_second"])
def test_values(kernels: ctypes.CDLL, kind: str, shape: str, dtype: torch.dtype, layout: str) -> None:
    x, given, fields = case(shape, kind, dtype, layout)
    wanted = native.fake_quant_shaped(x, **given)
    for order in ORDERS:
        got = like(wanted)
        cuda_host.run(kernels, FORWARD[given["shape"]], order, y=got, **fields)
        assert_same(got, wanted)


@pytest.mark.sweep(2)
@dtypes
@shapes
@kinds
@pytest.mark.parametrize("layout", ["dense", "every_second"])
def test_gradients(kernels: ctypes.CDLL, kind: str, shape: str, dtype: torch.dtype, layout: str) -> None:
    """dx bit for bit, also of the soft staircase; sums up to the order of their terms, and the same in every order."""
    x, given, fields = case(shape, kind, dtype, layout)
    grad = floats(dtype, 7)(*x.shape)
    wanted = native.fake_quant_shaped_backward(grad, x, **given)
    found = {order: gradients(kernels, order, given, {**fields, "grad": grad}, like(wanted[0])) for order in ORDERS}
    for dx, *sums in found.values():
        assert_same(dx, wanted[0])
        for got, want, same in zip(sums, wanted[1:], found["forwards"][1:], strict=True):
            assert torch.equal(got, same)
            tolerance = 1e-9 if dtype == torch.float64 else 1e-3
            torch.testing.assert_close(got.to(want.dtype), want.reshape(-1), rtol=tolerance, atol=tolerance * 100)


def gradients(kernels: ctypes.CDLL, order: str, given: dict, fields: dict, dx: Tensor) -> list[Tensor]:
    """dx, and the sums of scale, zero point and steepness; none of what is absent."""
    sums = torch.zeros(2, given["scale"].numel(), dtype=torch.float64)
    has_zero = given["zero_point"] is not None
    both = {"sum_scale": sums[0], **({"sum_zero_point": sums[1]} if has_zero else {})}
    cuda_host.run(kernels, BACKWARD[given["shape"]], order, y=dx, **fields, **both)
    results = [dx, sums[0], sums[1] if has_zero else sums[1][:0]]
    if given["steepness"] is None:
        return [*results, sums[1][:0]]
    soft = torch.zeros(given["scale"].numel(), dtype=torch.float64)
    given_soft = {"zero_point": given["steepness"], "fractional": True, "grad": dx, "sum_scale": soft}
    cuda_host.run(kernels, "soft_backward", order, y=dx, **fields | given_soft)
    return [*results, soft]


@pytest.mark.sweep(2)
@dtypes
@pytest.mark.parametrize(
    "shape", [shape for shape, (_, *cut) in SHAPES.items() if cut[0] in (None, 1) and cut[1:] == [1, 0]]
)
@pytest.mark.parametrize("layout", ["dense", "every_second"])
@pytest.mark.parametrize("zero_point", [None, torch.tensor([3.0])], ids=["symmetric", "affine"])
def test_prelu(kernels: ctypes.CDLL, shape: str, dtype: torch.dtype, layout: str, zero_point: Tensor | None) -> None:
    """Values and dx bit for bit; sums up to the order of their terms, and the same in every order."""
    sizes = SHAPES[shape][0]
    x, grad = STRIDED[layout](floats(dtype)(*sizes)), floats(dtype, 7)(*sizes)
    cut, wide = channels(*SHAPES[shape]), arithmetic(dtype)
    weight, scale = torch.linspace(-0.5, 0.7, cut[3], dtype=wide), torch.tensor([0.1], dtype=wide)
    fields = {"numel": x.numel(), "channels": cut, "x": x, "y_dtype": dtype_number(x), "bounds": (-20, 30)}
    fields |= {"scale": scale.repeat(cut[3]), "zero_point": weight, "fractional": True}
    fields |= {} if zero_point is None else {"shared": zero_point.to(wide)}
    grid = (weight, scale, zero_point, -20, 30)
    value = native.prelu_fake_quant(x, *grid)
    dx, *wanted = native.prelu_fake_quant_backward(grad, x, *grid)
    found = []
    for order in ORDERS:
        y, got = like(value), like(dx)
        cuda_host.run(kernels, "prelu_fake_quant", order, y=y, **fields)
        assert_same(y, value)
        sums = torch.zeros(2, cut[3], dtype=torch.float64)
        given = {"grad": grad, "sum_scale": sums[0], "sum_zero_point": sums[1]}
        cuda_host.run(kernels, "prelu_fake_quant_backward", order, y=got, **fields, **given)
        assert_same(got, dx)
        found.append(sums)
    assert all(torch.equal(sums, found[0]) for sums in found)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    for sum, want in zip((found[0][1], found[0][0].sum(0, keepdim=True)), wanted, strict=True):
        torch.testing.assert_close(sum.to(want.dtype), want, rtol=tolerance, atol=tolerance * 100)
