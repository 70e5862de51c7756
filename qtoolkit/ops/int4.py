"""4-bit codes, packed two per byte as in ONNX's INT4 and UINT4, directly from values and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtoolkit._native import Op, library

_dequantize_int4: Op = library.dequantize_int4.default
_quantize_int4: Op = library.quantize_int4.default


def quantize_int4(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -8,
    qmax: int = 7,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
) -> Tensor:
    """Return the codes of x as ONNX stores INT4 and UINT4: two per byte, the first in the low half, x in row-major order.

    The codes are those of `quantize`; the op reads x once and writes only the packed codes.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16. NaN becomes qmin.
        scale: Step between codes; see the module's docstring for its shape.
        zero_point: Code that zero maps to, or None for 0.
        qmin: Lowest code: at least -8 for signed codes, at least 0 for unsigned ones.
        qmax: Highest code: at most 7 for signed codes, at most 15 for unsigned ones.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.

    Returns:
        A uint8 tensor of shape ((x.numel() + 1) // 2,); for an odd number of codes, the high half of the last byte is 0.

    Raises:
        ValueError: A shape, axis, range, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> packed = quantize_int4(torch.tensor([1.0, -2.0, 7.0]), torch.tensor(1.0))
        >>> [hex(byte) for byte in packed]
        ['0xe1', '0x7']
    """
    return _quantize_int4(x, scale, zero_point, qmin, qmax, axis, group, block_size)


def dequantize_int4(
    packed: Tensor,
    size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None = None,
    signed: bool = True,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values `(codes - zero_point) * scale` of codes that `quantize_int4` packed.

    Args:
        packed: uint8 of shape ((number of codes + 1) // 2,).
        size: Shape of the result.
        scale: Step between codes; see the module's docstring for its shape, with x the result.
        zero_point: Code that zero maps to, or None for 0.
        signed: Whether codes are in [-8, 7] or in [0, 15].
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.
        dtype: float32, float64, bfloat16 or float16.

    Returns:
        A row-major tensor of `dtype` with shape `size`.

    Raises:
        ValueError: A shape, axis, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> packed = torch.tensor([0xE1, 0x07], dtype=torch.uint8)
        >>> dequantize_int4(packed, [3], torch.tensor(0.5))
        tensor([ 0.5000, -1.0000,  3.5000])
    """
    return _dequantize_int4(packed, size, scale, zero_point, signed, axis, group, block_size, dtype=dtype)
