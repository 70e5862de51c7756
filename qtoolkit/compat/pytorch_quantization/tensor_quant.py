"""pytorch_quantization.tensor_quant: quantization by the largest magnitude, and the descriptors.

`qtoolkit.ops` has the numerics by amax, and computes for 2 to 16 bits and an amax along one dimension. Scripts may use 1 bit,
more than 16 bits or an amax along several dimensions: `_codes` computes these, bit for bit by the same formula. The other
formulas here are pytorch-quantization's alone: the affine grid with a rounded lower end, and E4M3 by a multiplier.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.compat.pytorch_quantization.descriptor import *  # noqa: F403  # names that scripts import from here
from qtoolkit.ops.legacy import check_multiplier, check_values, has_values

TINY = 2.0**-24  # ranges up to here count as zero
E4M3_MAX = 448.0


class _StraightThrough(torch.autograd.Function):
    """Return `values` in forward; pass the gradient to x where the mask `passed` is true."""

    @staticmethod
    def forward(x: Tensor, values: Tensor, passed: Tensor) -> Tensor:
        return values.view_as(values)  # an output of autograd must not be an input

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (passed,) = ctx.saved_tensors
        return grad * passed, None, None


def tensor_quant(
    x: Tensor, amax: Tensor | float, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return codes, stored as floats, and their multiplier.

    `q = clamp(round_half_even(x * scale), minb, maxb)` with `scale = maxb / amax` and `maxb = 2^(num_bits - 1 + unsigned) - 1`.
    The gradient passes to x where |x| <= amax; amax has none.

    Args:
        x: Input of any shape, of a floating dtype.
        amax: Largest magnitude, a number or a tensor that broadcasts to x's shape. 2^-24 or less gives zeros.
        num_bits: Bits of a code, 1 or more.
        unsigned: Whether the lowest code is 0.
        narrow_range: Leave out the lowest of the signed codes.

    Returns:
        Codes with x's shape and dtype, and the multiplier with amax's shape and x's dtype.

    Raises:
        TypeError: unsigned and x has negative values (checked on CPU tensors).
        ValueError: amax has negative values, NaN or infinities (checked on CPU tensors; x may have NaN and infinities, and
            amax with it), a shape does not fit, num_bits is below 1, or the multiplier is too large for float16.

    Example:
        >>> tensor_quant(torch.tensor([-1.0, 0.3, 2.0]), 1.0, 4)
        (tensor([-7.,  2.,  7.]), tensor(7.))
    """
    amax = _as_tensor(amax, x)
    if _has_kernel(amax, num_bits):
        return ops.tensor_quant(x, amax, num_bits, unsigned, narrow_range)
    codes, scale = _codes(x, amax, num_bits, unsigned, narrow_range)
    scale = scale.to(x.dtype)
    check_multiplier(scale, amax)
    return _straight_through(x, codes, amax), scale


def fake_tensor_quant(
    x: Tensor, amax: Tensor | float, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Return the codes of `tensor_quant`, with its arguments and errors, divided by their multiplier.

    Example:
        >>> x = torch.tensor([0.5043, 0.8178, 0.4798, 0.9201])
        >>> fake_tensor_quant(x, x.abs().max())
        tensor([0.5071, 0.8187, 0.4782, 0.9201])
    """
    amax = _as_tensor(amax, x)
    if _has_kernel(amax, num_bits):
        return ops.fake_tensor_quant(x, amax, num_bits, unsigned, narrow_range)
    return legacy_fake_tensor_quant(x, amax, num_bits, unsigned, narrow_range)


def legacy_fake_tensor_quant(
    x: Tensor, amax: Tensor | float, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Compute `fake_tensor_quant` by torch's own ops.

    Example:
        >>> legacy_fake_tensor_quant(torch.tensor([[0.3, 2.0]]), torch.tensor([[1.0, 4.0]]), 3)
        tensor([[0.3333, 2.6667]])
    """
    amax = _as_tensor(amax, x)
    codes, scale = _codes(x, amax, num_bits, unsigned, narrow_range)
    return _straight_through(x, codes / scale, amax)


def fake_affine_tensor_quant(
    x: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Round x to an affine grid of signed codes over [min_range, max_range], and back.

    The step is `(max_range - min_range) / (2^num_bits - 1)`. The gradient passes to x where min_range <= x <= max_range.

    Args:
        x: Input of any shape, of a floating dtype.
        min_range: Lower end, one element.
        max_range: Upper end, one element, above the lower one.
        num_bits: Bits of a code, 1 or more.

    Returns:
        A tensor with x's shape and dtype.

    Raises:
        ValueError: The upper end is not above the lower one (checked on CPU tensors), or num_bits is below 1.

    Example:
        >>> fake_affine_tensor_quant(torch.tensor([-2.0, 0.1, 0.9]), -1.0, 2.0, 2)
        tensor([-1.,  0.,  1.])
    """
    _check_bits("fake_affine_tensor_quant", num_bits)
    wide = _wide(x)
    low, high = _as_tensor(min_range, wide).to(wide.dtype), _as_tensor(max_range, wide).to(wide.dtype)
    if has_values(low, high) and not bool((low < high).all()):
        raise ValueError(
            f"fake_affine_tensor_quant: max_range must be above min_range, got min_range={low} and max_range={high}."
        )
    step = (high - low) / (2.0**num_bits - 1)
    lowest = -(2.0 ** (num_bits - 1))
    zero = torch.round(low / step) - lowest
    codes = (torch.round(wide / step) - zero).clamp(lowest, -lowest - 1)
    return _StraightThrough.apply(x, ((codes + zero) * step).to(x.dtype), (low <= wide) & (wide <= high))  # type: ignore[no-any-return]


def scaled_e4m3(x: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3) -> Tensor:  # noqa: N803
    """Round x to the float format E4M3 and back, scaled so that amax becomes its largest number, 448.

    Larger values saturate; |x| < 2^-24 gives 0. The gradient passes to x where |x| <= amax.

    Args:
        x: Input of any shape, of a floating dtype.
        amax: Largest magnitude, broadcast to x's shape; None for 448, which does not scale. 2^-24 or less gives zeros.
        E: Bits of the exponent: 4.
        M: Bits of the mantissa: 3.

    Returns:
        A tensor with x's shape and dtype.

    Raises:
        NotImplementedError: E, M are not 4, 3.
        ValueError: amax has negative values, NaN or infinities (checked on CPU tensors, as by `tensor_quant`).

    Example:
        >>> scaled_e4m3(torch.tensor([0.3, 1.3, 5.0]), 2.0)
        tensor([0.2857, 1.2857, 2.0000])
    """
    if (E, M) != (4, 3):
        raise NotImplementedError(
            f"scaled_e4m3: E, M must be 4, 3, got {E}, {M}; other float formats are not supported."
        )
    wide, amax = _wide(x).detach(), _as_tensor(E4M3_MAX if amax is None else amax, x)
    check_values(x, amax, unsigned=False)
    largest = amax.detach().to(wide.dtype)
    scale = torch.where(largest <= TINY, 1.0, E4M3_MAX / largest)
    values = ops.fake_quant_float(wide * scale, wide.new_ones(()), "e4m3") / scale
    return _straight_through(x, values.masked_fill((wide.abs() < TINY) | (largest <= TINY), 0), amax)


# ---- names of the autograd functions


def function_class(name: str, apply: Callable[..., Any]) -> type:
    """Return a class with the name of an autograd function of pytorch-quantization, whose `apply` is the given function."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__, "__module__": apply.__module__})


TensorQuantFunction = function_class("TensorQuantFunction", tensor_quant)
FakeTensorQuantFunction = function_class("FakeTensorQuantFunction", fake_tensor_quant)
LegacyFakeTensorQuantFunction = function_class("LegacyFakeTensorQuantFunction", legacy_fake_tensor_quant)
FakeAffineTensorQuantFunction = function_class("FakeAffineTensorQuantFunction", fake_affine_tensor_quant)
ScaledE4M3Function = function_class("ScaledE4M3Function", scaled_e4m3)


# ---- what the functions share


def _as_tensor(amax: Tensor | float, x: Tensor) -> Tensor:
    return amax if isinstance(amax, Tensor) else torch.tensor(amax, dtype=torch.float32, device=x.device)


def _has_kernel(amax: Tensor, num_bits: int) -> bool:
    """Return whether the native op supports these bits and this shape of amax."""
    return 2 <= num_bits <= 16 and sum(size != 1 for size in amax.shape) <= 1


def _check_bits(op: str, num_bits: int) -> None:
    if num_bits < 1:
        raise ValueError(f"{op}: num_bits must be 1 or more, got {num_bits}.")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _codes(x: Tensor, amax: Tensor, num_bits: int, unsigned: bool, narrow_range: bool) -> tuple[Tensor, Tensor]:
    _check_bits("tensor_quant", num_bits)
    check_values(x, amax, unsigned)
    wide = _wide(x).detach()
    high = 2.0 ** (num_bits - 1 + unsigned) - 1
    low = 0.0 if unsigned else -high if narrow_range else -high - 1
    largest = amax.detach().to(wide.dtype)
    bound = torch.full_like(largest, high)  # torch multiplies a number by the reciprocal of the tensor that divides it
    scale = torch.where(largest <= TINY, 1.0, bound / largest)
    codes = torch.round(wide * scale).clamp(low, high) + 0.0  # no negative zeros
    return codes.masked_fill(largest <= TINY, 0), scale


def _straight_through(x: Tensor, values: Tensor, amax: Tensor) -> Tensor:
    wide = _wide(x).detach()
    passed = wide.abs() <= amax.detach().to(wide.dtype)
    return _StraightThrough.apply(x, values.to(x.dtype), passed)  # type: ignore[no-any-return]
