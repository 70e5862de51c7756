"""Ops of `qtoolkit.ops` with the arguments that a QuantSpec gives."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit._native import library
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import BLOCKS, LARGEST, BlockFormat
from qtoolkit.running import Run, running

_straight_through = library.straight_through.default


def range_of(spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of a grid, of the scale's shape."""
    shift = 0 if zero_point is None else zero_point
    return (spec.qmin - shift) * scale, (spec.qmax - shift) * scale


def ends_of(magnitude: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of a symmetric range: of both signs, or from zero on."""
    return -magnitude if signed else torch.zeros_like(magnitude), magnitude


def typed_scale(spec: QuantSpec, scale: Tensor) -> Tensor:
    """Return a scale in numbers of the type that the spec says; the gradient passes straight through."""
    return ops.float16_scale(scale) if spec.scale_dtype == "float16" else scale


def fake_quant(
    spec: QuantSpec,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group: int,
    block_size: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """Return the values nearest to x on a spec's grid, in any of its formats."""
    channels = (spec.axis, group, block_size)
    if spec.format != "int":
        return ops.fake_quant_float(x, scale, spec.element, *channels)
    scale, zero_point, grad_factor = with_factor(scale, zero_point, grad_factor)
    return ops.fake_quant(x, scale, zero_point, spec.qmin, spec.qmax, *channels, grad_factor)


def with_factor(scale: Tensor, zero_point: Tensor | None, grad_factor: float) -> tuple[Tensor, Tensor | None, float]:
    """Return a grid and its gradient factor as ops take them: compiled, the factor, of a size, is outside of the op.

    The op's own would be a constant there: a graph for each size. An exported program has no gradient factor.
    """
    run = Run.EAGER if grad_factor == 1.0 else running()
    if not run.compiled:
        return scale, zero_point, grad_factor
    if run.recorded:
        return scale, zero_point, 1.0
    return _with_factor(scale, grad_factor), None if zero_point is None else _with_factor(zero_point, grad_factor), 1.0


def _with_factor(x: Tensor, factor: float) -> Tensor:
    """Return x, exactly, whose gradient is multiplied by a factor."""
    still = x.detach()
    return still + (x - still) * factor


@functools.cache
def _numbers(format: str) -> Tensor:
    """Return the numbers of a small float format that are not negative, in order."""
    if format == "e2m1":
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers <= LARGEST[format]]  # without infinity and NaN


def float_codes(spec: QuantSpec, x: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return the place of each x in a small float format, int16: how many numbers of the format lie between 0 and it.

    They are negative for negative numbers. NaN has the place of the largest number.

    Example:
        >>> spec = qt.QuantSpec(bits=4, format="e2m1")
        >>> float_codes(spec, torch.tensor([0.5, -2.1, 9.0]), torch.tensor(1.0), 1)
        tensor([ 1, -4,  7], dtype=torch.int16)
    """
    numbers = _numbers(spec.element).to(x.device)
    quotient = x.float() / per_element(scale, x, spec, group).float()
    nearest = ops.fake_quant_float(quotient, scale.new_ones((), dtype=torch.float32), spec.element)
    found = torch.searchsorted(numbers, nearest.abs()).clamp(max=len(numbers) - 1)
    return torch.where(nearest < 0, -found, found).to(torch.int16)


def float_values(spec: QuantSpec, codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return the values at places in a small float format."""
    numbers = _numbers(spec.element).to(codes.device)[codes.abs().long()]
    return torch.where(codes < 0, -numbers, numbers) * per_element(scale, codes, spec, group).float()


def lsq_start(mean: Any, qmax: int) -> Any:
    """Return LSQ's start for a tensor with this mean magnitude: 2 mean|v| / sqrt(qmax) (arXiv 1902.08153, section 2.1).

    Example:
        >>> lsq_start(0.5, 4)
        0.5
    """
    return 2 * mean / qmax**0.5


def rows_of(x: Tensor, count: int, axis: int | None, group: int, block_size: int) -> Tensor:
    """Return the elements of x as (scales, elements), in the order of the scales, of which there are `count`.

    Example:
        >>> rows_of(torch.tensor([[1, 2], [3, 4], [5, 6]]), 2, 1, 1, 0)
        tensor([[1, 3, 5],
                [2, 4, 6]])
    """
    if axis is None:
        return x.reshape(1, x.numel())
    axis = axis % x.dim()
    if block_size:
        rows = torch.unflatten(x, axis, (-1, block_size)).movedim(axis + 1, -1)
    else:
        rows = torch.unflatten(x, 0, (group, x.size(0) // group)).movedim(axis + 1, 1)
    return rows.reshape(count, x.numel() // max(count, 1))


def mean_magnitude(x: Tensor, scale: Tensor, spec: QuantSpec, group: int = 1) -> Tensor:
    """Return the mean magnitudes of the elements of x that share a scale, of the shape and dtype of the scale.

    Example:
        >>> mean_magnitude(torch.tensor([[1.0, -3.0], [0.0, 4.0]]), torch.ones(2), qt.QuantSpec(axis=0))
        tensor([2., 2.])
    """
    rows = rows_of(x.abs(), scale.numel(), spec.axis, group, spec.block_size)
    return rows.mean(1, dtype=torch.float64).reshape(scale.shape).to(scale.dtype)


def per_element(values: Tensor, x: Tensor, spec: QuantSpec, group: int = 1) -> Tensor:
    """Return values of a scale's shape, shaped to broadcast over x, a tensor that the spec quantizes. Differentiable.

    Example:
        >>> per_element(torch.tensor([1.0, 2.0]), torch.ones(3, 2, 4), qt.QuantSpec(axis=1)).shape
        torch.Size([1, 2, 1])
    """
    if spec.axis is None or values.numel() == 1:
        return values.reshape(())
    axis = spec.axis % x.dim()
    if spec.group_size is not None:
        sizes = [size // spec.group_size if dim == axis else size for dim, size in enumerate(x.shape)]
        return values.reshape(sizes).repeat_interleave(spec.group_size, axis)
    sizes = [size if dim == axis else 1 for dim, size in enumerate(x.shape)]
    if group == 1:
        return values.reshape(sizes)
    parts = values.reshape(group, *sizes)  # dimension 0 of x is divided into groups, each with channels of its own
    return parts.expand(group, x.size(0) // group, *sizes[1:]).reshape(x.size(0), *sizes[1:])


def clip(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return x within [low, high]. NaN stays NaN.

    The gradient at a bound goes to x; torch.clamp's depends on torch's version.
    """
    return torch.where(x < low, low, torch.where(x > high, high, x))


def straight_through(value: Tensor, through: Tensor) -> Tensor:
    """Return `value`, exactly, with the gradient of `through`, a tensor of the same shape."""
    straight: Tensor = _straight_through(value, through)
    return straight


def trained_by_ratio(unit: Tensor, ratio: Tensor, rate: Tensor) -> Tensor:
    """Return unit * ratio, with the gradient of ratio times rate, divided by unit squared.

    So a step of SGD changes the product as if it were the parameter; see `qtoolkit.ops.positive_scale`, whose result is
    positive.
    """
    unit = unit.reshape(ratio.shape)
    moved = ratio * (rate.reshape(ratio.shape) / unit.square())
    return straight_through(unit * ratio, unit * moved)


def grid_of_range(lo: Tensor, hi: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Return the scale, and for an affine spec the zero point, whose grid covers the range [lo, hi], float32, of any shape.

    See `qtoolkit.ops.grid_of_range`. NaN or infinite ranges give scales that are not finite.

    Example:
        >>> grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), qt.QuantSpec(signed=False, symmetric=False, bits=2))
        (tensor(1.3333), tensor(1.))
    """
    if spec.format in BLOCKS:
        return _block_scales(torch.maximum(-lo, hi), BLOCKS[spec.format]), None
    return ops.grid_of_range(lo, hi, spec.qmin, spec.qmax, spec.symmetric, spec.pow2_scale)


def _block_scales(amax: Tensor, block: BlockFormat) -> Tensor:
    """Return the scales of blocks from their largest magnitudes, as `qtoolkit.ops.fake_quant_block` computes them."""
    if block.scale_format == "e8m0":
        _, exponent = torch.frexp(amax)  # amax = m 2^exponent with m in [1/2, 1)
        highest = math.frexp(block.largest)[1]
        scale = torch.exp2((exponent - highest).clamp(-126, 127).to(amax.dtype))
        return torch.where(amax == 0, 2.0**-126, torch.where(amax.isfinite(), scale, torch.nan))
    of_tensor = (amax.amax() / (LARGEST[block.scale_format] * block.largest)).clamp(min=2.0**-126)
    scale = ops.fake_quant_float(amax / block.largest, of_tensor, block.scale_format)
    return torch.where(scale == 0, 2.0**-126, scale)
