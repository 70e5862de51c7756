"""The numerics of pytorch-quantization 2.x: multipliers from amax."""

import math

import torch
from torch import Tensor

from qtoolkit._native import TupleOp, library
from qtoolkit.running import running

_fake_tensor_quant: TupleOp = library.fake_tensor_quant.default
_tensor_quant = library.tensor_quant.default


def has_values(*tensors: Tensor) -> bool:
    """Return whether values can be checked: not while compiling or tracing, nor on a GPU, for which the check would wait."""
    run = running()
    return not (run.compiled or run.recorded) and all(t.device.type == "cpu" for t in tensors)


def check_values(x: Tensor, amax: Tensor, unsigned: bool) -> None:
    """Raise an error for values that cannot be quantized, where values can be checked. If x has NaN or infinities, amax may."""
    if not has_values(x, amax) or amax.numel() == 0:
        return
    if unsigned and bool((x < 0).any()):
        raise TypeError("Negative values encountered in unsigned quantization.")
    low, high = (float(end) for end in ((amax, amax) if amax.numel() == 1 else torch.aminmax(amax)))
    if low < 0:
        raise ValueError("Negative values in amax")
    if not high < math.inf and bool(x.isfinite().all()):
        raise ValueError(
            "NaN or infinities in amax, of an input that has none: the range was set, loaded or calibrated wrongly; calibrate "
            "again."
        )


def tensor_quant(
    x: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return quantized values, stored as floats, and their multiplier: `tensor_quant` of pytorch-quantization 2.x.

    `q = clamp(round_half_even(x * scale), minb, maxb)` with `scale = maxb / amax`: a multiplier, not ONNX's step. In new
    programs use `quantize`, which computes the integers of deployed models. Arithmetic is float32 (float64 for float64). The
    gradient in x passes where |x| <= amax; amax has none.

    Values are checked on CPU tensors only, since the check would wait for a GPU. On a GPU the magnitude of amax is used,
    negative values are clamped to 0 if unsigned, and an amax of NaN gives NaN.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        amax: Largest magnitude, broadcast to x's shape. 2^-24 or less gives zeros.
        num_bits: Bits of a quantized value, 1 to 64.
        unsigned: Integers from 0 to 2^num_bits - 1.
        narrow_range: Omit the lowest signed integer.

    Returns:
        The quantized values, with x's shape, dtype and memory format, and the multiplier, with amax's shape and x's dtype: 1 if
        amax is 2^-24 or less.

    Raises:
        ValueError: amax has negative values, NaN or infinities (unless x has NaN or infinities), its shape or device or
            num_bits does not fit, or the multiplier is too large for float16.
        TypeError: unsigned and x has negative values, or a dtype does not fit.

    Example:
        >>> tensor_quant(torch.tensor([-1.0, 0.3, 2.0]), torch.tensor(1.0), num_bits=4)
        (tensor([-7.,  2.,  7.]), tensor(7.))
    """
    check_values(x, amax, unsigned)
    codes, scale, _ = _tensor_quant(x, amax, num_bits, unsigned, narrow_range)
    if scale.dtype == torch.float16 and has_values(scale) and bool(scale.isinf().any()):
        raise ValueError(f"scale is too large for FP16 with amax={amax}")
    return codes, scale


def fake_tensor_quant(
    x: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Round x to an integer grid and back: `fake_tensor_quant` of pytorch-quantization 2.x.

    The values of `tensor_quant`, with its arguments and errors, divided by its multiplier. New programs use `fake_quant`, whose
    grid is ONNX's. The result has the shape, dtype and memory format of x. The gradient in x passes where |x| <= amax, for
    which one bit per element is saved; amax has none.

    Example:
        >>> x = torch.tensor([0.5043, 0.8178, 0.4798, 0.9201])
        >>> fake_tensor_quant(x, x.abs().max())
        tensor([0.5071, 0.8187, 0.4782, 0.9201])
    """
    check_values(x, amax, unsigned)
    return _fake_tensor_quant(x, amax, num_bits, unsigned, narrow_range)[0]
