"""The arithmetic of runtimes on codes, against the formulas of their sources in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qtoolkit.ops.requantize import (
    add_codes,
    average_codes,
    centred_codes,
    fake_quant_away,
    fake_quant_by_factor,
    hard_swish_codes,
    requantize,
    requantize_fixed_point,
    resize_linear_codes,
    softmax_codes,
)
from tests.cases import LAYOUTS, assert_laid_out_as, floats, scales
from tests.export import litert_kernels
from tests.ops.devices import Device, check, devices

native = torch.ops.qtoolkit
f32, f64 = np.float32, np.float64


def fused(a: np.ndarray, b: f32, c: f32) -> np.ndarray:
    return (f64(a) * f64(b) + f64(c)).astype(f32)


def values(codes: np.ndarray, scale: Tensor, low: int, high: int) -> np.ndarray:
    return np.clip(codes, f32(low), f32(high)) * f32(scale)


def steps(t: Tensor) -> Tensor:
    """Values around rounding ties of factors that are powers of two."""
    return (t * 8).round() / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requantize(layout: str, dtype: torch.dtype) -> None:
    x, scale = steps(LAYOUTS[layout](floats(dtype))), torch.tensor(0.3)
    v = x.numpy().astype(f32)
    factors = [torch.tensor(0.25)]
    if x.dim() >= 2:
        factors.append(scales(x.size(1)).reshape(-1, *[1] * (x.dim() - 2)))
    for factor in factors:
        f = factor.numpy()
        plain = requantize(x, factor, scale, -8, 7)
        assert plain.dtype == torch.float32
        assert_laid_out_as(plain, x)
        assert np.array_equal(plain.numpy(), values(np.rint(np.clip(v * f, f32(-8), f32(7))), scale, -8, 7))
        after = requantize(x, factor, scale, -8, 7, zero_code=5)
        assert np.array_equal(after.numpy(), values(np.rint(v * f + f32(5)) - f32(5), scale, -8, 7))
        joined = requantize(x, factor, scale, -8, 7, torch.tensor(0.3), 3, True)
        assert np.array_equal(joined.numpy(), values(np.rint(fused(v, f, f32(0.3))) - f32(3), scale, -8, 7))
    quotient = requantize(x, None, scale, -8, 7, zero_code=5)
    assert np.array_equal(quotient.numpy(), values(np.rint(v / f32(0.3) + f32(5)) - f32(5), scale, -8, 7))


GRID = torch.ones(()), 0
GRIDS = [((0.1, 3), (0.07, 250), (0.13, 128)), ((1.0, 128), (0.5, 0), (0.25, 7)), ((1e-3, 9), (4.0, 1), (3.0, 2))]


def operands(a: tuple, b: tuple) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    codes = [torch.randint(0, 256, (5, 1037), generator=generator) - zero for _, zero in (a, b)]
    return tuple(c.float() * torch.tensor(scale) for c, (scale, _) in zip(codes, (a, b), strict=True))


def wanted_sum(x: Tensor, other: Tensor, grids: tuple, fixed_point: bool) -> np.ndarray:
    """Of qladd_avx2.cpp, or of microparams-init.c and qs8-vadd."""
    (sa, za), (sb, zb), (sy, zy) = ((f32(s), z) for s, z in grids)
    a, b = np.rint(x.numpy() / sa), np.rint(other.numpy() / sb)
    ra, rb = f32(sa / sy), f32(sb / sy)
    if fixed_point:
        shift = 20 - (math.frexp(max(ra, rb))[1] - 1)
        factors = [round(float(r) * 2**shift) for r in (ra, rb)]
        codes = np.floor((a.astype(f64) * factors[0] + b.astype(f64) * factors[1]) / 2.0**shift + 0.5).astype(f32)
    else:
        fixed = f32(zy) - fused(ra, f32(za), f32(rb * f32(zb)))
        inner = fused(b + f32(zb), rb, fixed)
        codes = np.rint((f64(a + f32(za)) * f64(ra) + inner.astype(f64)).astype(f32)) - f32(zy)
    return np.clip(codes, f32(-zy), f32(255 - zy)) * sy


@pytest.mark.parametrize("fixed_point", [False, True])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_add_codes(grids: tuple, fixed_point: bool) -> None:
    (x, other), (sa, za), (sb, zb), (sy, zy) = operands(*grids[:2]), *((torch.tensor(s), z) for s, z in grids)
    wanted = wanted_sum(x, other, grids, fixed_point)
    for along in (other, other[:1], other.t().contiguous().t()):
        y = add_codes(x, sa, za, along, sb, zb, sy, zy, -zy, 255 - zy, fixed_point)
        assert np.array_equal(y.numpy(), wanted if along.shape == x.shape else wanted_sum(x, along, grids, fixed_point))


def sums_on_ties(factor: float) -> Tensor:
    """Integers around those whose product with a factor is the middle between two codes, and the largest."""
    middles = ((torch.arange(-150, 150).double() + 0.5) / factor).round()
    near = torch.cat([middles + step for step in (-1, 0, 1)])
    ends = torch.tensor([-(2**31) + 1, 2**31 - 1, 0, 1, -1], dtype=torch.float64)
    return torch.cat([near[near.abs() < 2**31], ends])


@pytest.mark.parametrize(
    "factor", [0.0037, 2.0**-7, 1 - 2.0**-40, 1 - 2.0**-31, 0.75, 1.0, 2.0**-33, 3e-10, float(f32(0.1) * f32(0.3))]
)
def test_requantize_fixed_point(factor: float) -> None:
    """As MultiplyByQuantizedMultiplier, in integers of 64 bits."""
    x = sums_on_ties(factor)
    y = requantize_fixed_point(x, torch.tensor(factor, dtype=torch.float64), torch.tensor(0.3), -130, 125)
    wanted = litert_kernels.scaled(x.numpy().astype(np.int64), f64(factor))
    assert y.dtype == torch.float32
    assert np.array_equal(y.numpy(), values(wanted.astype(f32), torch.tensor(0.3), -130, 125))
    once = requantize_fixed_point(x, torch.tensor(factor).double(), torch.tensor(0.3), -130, 125, rounded_once=True)
    wanted = litert_kernels.scaled_once(x.numpy().astype(np.int64), f64(f32(factor)))
    assert np.array_equal(once.numpy(), values(wanted.astype(f32), torch.tensor(0.3), -130, 125))


def test_requantize_fixed_point_by_larger_factors_for_each_channel() -> None:
    factors = torch.tensor([0.003, 1.7, 900.0, 2.0**20], dtype=torch.float64)
    x = torch.randint(-1000, 1000, (2, 4, 37), generator=torch.Generator().manual_seed(0)).float()
    y = requantize_fixed_point(x, factors[:, None], torch.tensor(2.0), -(2**23), 2**23)
    wanted = litert_kernels.scaled(x.numpy().transpose(0, 2, 1).astype(np.int64), factors.numpy())
    assert np.array_equal(y.numpy(), np.clip(wanted, -(2**23), 2**23).astype(f32).transpose(0, 2, 1) * f32(2))


@pytest.mark.parametrize("count", [1, 2, 3, 49, 1024, 50_176, 2**20 - 1])
@pytest.mark.parametrize("real", [0.0371, 1.0, 0.999999999999, 37.5, 2.0**-29, 2.0**-33])
def test_requantize_fixed_point_of_means(real: float, count: int) -> None:
    x = torch.arange(-127.0, 128.0) * count + torch.arange(-127.0, 128.0) % count
    y = requantize_fixed_point(
        x, torch.tensor(real, dtype=torch.float64), torch.tensor(1.0), -(2**20), 2**20, count=count
    )
    wanted = litert_kernels.mean_of(x.numpy().astype(np.int64), np.float64(real), count)
    assert np.array_equal(y.numpy(), np.clip(wanted, -(2**20), 2**20).astype(f32))


def test_average_codes() -> None:
    sums, counts = torch.arange(-300.0, 300.0), torch.arange(600.0) % 7 + 1
    halves = torch.where(sums >= 0, sums + (counts / 2).floor(), sums - (counts / 2).floor())
    assert torch.equal(average_codes(sums, counts), torch.trunc(halves.double() / counts).float())
    assert torch.equal(average_codes(sums.double(), counts), average_codes(sums, counts))


def test_ops_on_codes_take_what_the_kernels_take() -> None:
    """Their codes are those of LiteRT's interpreter: tests/export/test_litert.py."""
    x = torch.arange(-128.0, 128.0).reshape(4, 4, 4, 4)
    assert torch.equal(softmax_codes(x, 0.05, 1), softmax_codes(x + 17, 0.05, 1))
    assert torch.equal(softmax_codes(x.transpose(1, 3), 0.05, 3), softmax_codes(x, 0.05, 1).transpose(1, 3))
    gelu_like = hard_swish_codes(x, 0.05, 0.05, -128, 127) * 0.05
    assert torch.allclose(gelu_like, torch.nn.functional.hardswish(x * 0.05), atol=0.05)
    for aligned in (False, True):
        wanted = torch.nn.functional.interpolate(x, (7, 9), mode="bilinear", align_corners=aligned)
        assert torch.allclose(resize_linear_codes(x, (7, 9), aligned), wanted, atol=1)


@pytest.mark.parametrize("subtract", [False, True])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_add_codes_rounded_twice(grids: tuple, subtract: bool) -> None:
    """As LiteRT's reference kernel, by the formulas that its interpreter meets code by code."""
    x, other = operands(*grids[:2])
    (sa, za), (sb, zb), (sy, zy) = ((f32(s), z) for s, z in grids)
    a, b = (np.rint(t.numpy() / s).astype(np.int64) << 20 for t, s in ((x, sa), (other, sb)))
    twice = 2 * max(float(sa), float(sb))
    left, right = (litert_kernels.scaled(t, float(s) / twice) for t, s in ((a, sa), (b, sb)))
    codes = litert_kernels.scaled(left - right if subtract else left + right, twice / (2**20 * float(sy)))
    given = (torch.tensor(sa), za, other, torch.tensor(sb), zb, torch.tensor(sy), zy, -zy, 255 - zy)
    y = add_codes(x, *given, rounded_twice=True, subtract=subtract)
    assert np.array_equal(y.numpy(), np.clip(codes, -zy, 255 - zy).astype(f32) * sy)


@pytest.mark.parametrize("zero_point", [None, 3.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_quant_by_factor(layout: str, zero_point: float | None) -> None:
    x, scale, zero = LAYOUTS[layout](floats(torch.float32)), f32(0.37), f32(zero_point or 0)
    given = None if zero_point is None else torch.tensor(zero_point)
    low, high = (f32(-8) - zero) * scale, (f32(7) - zero) * scale
    factor = f32(15) / (high - low)
    codes = np.clip(np.rint(x.numpy() * factor - low * factor), f32(0), f32(15))
    y = fake_quant_by_factor(x, torch.tensor(scale), given, -8, 7)
    assert_laid_out_as(y, x)
    assert np.array_equal(y.numpy(), (codes + f32(-8) - zero) * scale)


@pytest.mark.parametrize("zero_point", [None, 3.0])
def test_fake_quant_away(zero_point: float | None) -> None:
    """Halves away from zero, as std::round."""
    x = torch.cat([torch.arange(-40.0, 40.0) / 8, torch.tensor([0.5 - 2.0**-25, math.inf, -math.inf, math.nan])])
    given, zero = None if zero_point is None else torch.tensor(zero_point), zero_point or 0.0
    y = fake_quant_away(x, torch.tensor(1.0), given, -4, 4)
    rounded = [math.copysign(math.floor(abs(v) + 0.5), v) if abs(v) >= 0.5 else 0.0 for v in x[:-3].tolist()]
    assert y[:-4].tolist() == [min(max(v + zero, -4), 4) - zero for v in rounded[:-1]]
    assert y[-4:-1].tolist() == [0.0, 4 - zero, -4 - zero]
    assert y[-1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_centred_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(-300.0, 300.0)
    found = centred_codes((codes * 0.5).to(dtype), torch.tensor(0.5))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, (codes * 0.5).to(dtype).to(found.dtype).mul(2).round())
    assert centred_codes(torch.tensor([torch.nan]), torch.tensor(1.0)).isnan().all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: requantize(x, torch.ones(3), torch.ones(2), 0, 1), "requantize: scale must have 1 element, got 2"),
        (lambda x: requantize(x, torch.ones(4), torch.ones(1), 0, 1), "requantize: factor must broadcast to the shape"),
        (lambda x: requantize(x, None, torch.ones(1), 1, 0), "requantize: qmin must be smaller than qmax"),
        (lambda x: requantize(x, None, torch.ones(1), 0, 1, None, 2**40), "requantize: zero_code must lie in"),
        (lambda x: centred_codes(x, torch.ones(3)), "centred_codes: scale must have 1 element, got 3"),
        (
            lambda x: requantize_fixed_point(x, torch.ones(()), torch.ones(1), 0, 1, 2**20),
            r"requantize_fixed_point: count must lie in \[1, 2\^20\), got 1048576",
        ),
        (lambda x: resize_linear_codes(x, (2, 2), True), "resize_linear_codes: x must be images"),
        (
            lambda x: resize_linear_codes(x[None, None], (2, 0), True),
            "resize_linear_codes: size must be height and width",
        ),
        (lambda x: average_codes(x, x[0]), "average_codes: counts must have the shape of sums"),
        (lambda x: softmax_codes(x, 100.0, 1), "softmax_codes: scale must lie in"),
        (
            lambda x: hard_swish_codes(x, 1.0, 1e-3, 0, 1),
            "hard_swish_codes: scale must be more than a part in 127",
        ),
        (
            lambda x: add_codes(x, *GRID, x, *GRID, *GRID, 0, 1, subtract=True),
            "add_codes: subtract needs rounded_twice=True",
        ),
        (
            lambda x: add_codes(x, *GRID, x, *GRID, *GRID, 0, 1, True, True),
            "add_codes: fixed_point and rounded_twice name two kernels",
        ),
    ],
)
def test_errors(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call(torch.ones(2, 3))


def test_backward_raises() -> None:
    x, one = torch.ones(3, requires_grad=True), torch.ones(())
    for y in (requantize(x, one, one, -8, 7), centred_codes(x, one), fake_quant_by_factor(x, one, None, -8, 7)):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            y.sum().backward()


@devices
def test_cuda_kernels(device: Device) -> None:
    x, scale, factors, offset = (
        steps(floats(torch.float32)(6, 6, 37)),
        torch.tensor(0.3),
        scales(6)[:, None],
        torch.tensor(0.3),
    )
    for joined in (False, True):
        check(device, requantize, x, factors, scale, -8, 7, offset, 3, joined)
    check(device, requantize, x, None, scale, -8, 7, offset, 3)
    check(device, fake_quant_by_factor, x, scale, None, -8, 7)
    check(device, centred_codes, x, scale)
    sums, factor = sums_on_ties(0.0037)[:896].reshape(7, 128), torch.tensor([0.0037]).double()
    for count, once in ((1, False), (49, False), (1, True)):
        check(device, requantize_fixed_point, sums, factor, scale, -130, 125, count, once)
    for grids in GRIDS:
        (a, b), zero = operands(*grids[:2]), grids[2][1]
        sides = [(torch.tensor(scale), zero) for scale, zero in grids]
        for fixed_point, twice, subtract in (
            (False, False, False),
            (True, False, False),
            (False, True, False),
            (False, True, True),
        ):
            given = (a, *sides[0], b, *sides[1], *sides[2], -zero, 255 - zero, fixed_point, twice, subtract)
            check(device, add_codes, *given)
