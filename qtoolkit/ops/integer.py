"""Integer grids: fake quantization, and quantize and dequantize as in deployed models, also 4 bits packed as in ONNX."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtoolkit._native import Op, TupleOp, library
from qtoolkit.ops.batching import fake_quant_of_samples
from qtoolkit.ops.recording import recorded
from qtoolkit.running import running

_dequantize: Op = library.dequantize.default
_dequantize_int4: Op = library.dequantize_int4.default
_fake_quant: TupleOp = library.fake_quant.default
_fake_quant_ = library.fake_quant_.default
_quantize: Op = library.quantize.default
_quantize_int4: Op = library.quantize_int4.default

torch.library.register_vmap(library.fake_quant.default, fake_quant_of_samples)


def fake_quant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    grad_factor: float = 1.0,
) -> Tensor:
    """Round x to an integer grid and back to floats, with a straight-through gradient.

    The gradient in x passes where nothing was clamped, and is zero elsewhere. If `scale` (or `zero_point`) requires
    grad, it gets the gradient of LSQ (arXiv 1902.08153) and LSQ+ (2004.09576), times `grad_factor`. With a fixed scale, one
    bit per element is saved for backward. NaN stays NaN, infinities are clamped.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        scale: Step size; see the module's docstring for its shape.
        zero_point: Integer that zero maps to, or None for 0.
        qmin: Lowest quantized value.
        qmax: Highest quantized value.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.
        grad_factor: Factor of the gradients of scale and zero_point.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: A shape, axis, range, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> x = torch.tensor([-1.0, 0.04, 0.05, 0.15, 9.0])
        >>> fake_quant(x, torch.tensor(0.1), qmin=-8, qmax=7)
        tensor([-0.8000,  0.0000,  0.0000,  0.2000,  0.7000])
        >>> fake_quant(x[:4], torch.tensor([0.1, 1.0]), axis=0, block_size=2)
        tensor([-1.,  0.,  0.,  0.])
    """
    run = running()
    if run.recorded:
        form = recorded(run, x, scale, zero_point, "int", (qmin, qmax), axis, group, block_size)
        if form is not None:
            return form
    return _fake_quant(x, scale, zero_point, qmin, qmax, axis, group, block_size, grad_factor)[0]


def fake_quant_(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
) -> Tensor:
    """Round x to an integer grid in place: `fake_quant` without memory for a second tensor. Returns x.

    The arguments are `fake_quant`'s, and scale and zero_point must not require grad. Differentiable in x: the gradient
    passes where nothing was clamped, and one bit per element is saved for backward. As with every in-place op, autograd
    raises an error if an earlier op has saved x for its own backward. If x has gaps in memory (a slice) or groups that are not
    contiguous, the op makes a temporary copy.

    Raises:
        ValueError: A shape, axis, range, group or device does not fit, or x is expanded.
        TypeError: A dtype does not fit.
        NotImplementedError: scale or zero_point requires grad.
        RuntimeError: x is a leaf that requires grad, or a view of one.

    Example:
        >>> x = torch.tensor([-1.0, 0.04, 0.15, 9.0])
        >>> fake_quant_(x, torch.tensor(0.1), qmin=-8, qmax=7) is x
        True
        >>> x
        tensor([-0.8000,  0.0000,  0.2000,  0.7000])
    """
    _fake_quant_(x, scale, zero_point, qmin, qmax, axis, group, block_size)
    return x


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    """Quantize x to integers, as ONNX QuantizeLinear does.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16. NaN becomes qmin, as in onnxruntime.
        scale: Step size.
        zero_point: Integer that zero maps to, or None for 0.
        qmin: Lowest quantized value; must fit `dtype`.
        qmax: Highest quantized value; must fit `dtype`.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.
        dtype: torch.int8, uint8, int16, uint16 or int32.

    Returns:
        A tensor of `dtype` with the shape and memory format of x.

    Raises:
        ValueError: A shape, axis, range, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> quantize(torch.tensor([-1.0, 0.05, 0.15]), torch.tensor(0.1))
        tensor([-10,   0,   2], dtype=torch.int8)
    """
    return _quantize(x, scale, zero_point, qmin, qmax, axis, group, block_size, dtype=dtype)


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values `(codes - zero_point) * scale` of integers.

    Args:
        codes: int8, uint8, int16, uint16 or int32, of any shape.
        scale: Step size.
        zero_point: Integer that zero maps to, or None for 0.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.
        dtype: float32, float64, bfloat16 or float16.

    Returns:
        A tensor of `dtype` with the shape and memory format of `codes`.

    Raises:
        ValueError: A shape, axis, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> dequantize(torch.tensor([-10, 0, 2], dtype=torch.int8), torch.tensor(0.5))
        tensor([-5.,  0.,  1.])
    """
    return _dequantize(codes, scale, zero_point, axis, group, block_size, dtype=dtype)


def quantize_int4(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -8,
    qmax: int = 7,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    in_memory_order: bool = False,
) -> Tensor:
    """Quantize x to integers as ONNX stores INT4 and UINT4: two per byte, the first in the low half, x in row-major order.

    The arguments and the integers are `quantize`'s, in [-8, 7] or [0, 15]; the op reads x once and writes only the packed
    integers: uint8 of shape ((x.numel() + 1) // 2,). For an odd number of elements, the high half of the last byte is
    0. With `in_memory_order`, an image in channels_last with an even number of channels is (N, C / 2, H, W) instead, in
    channels_last, with channel 2i in the low half of channel i: both are then read in the order of memory.

    Raises:
        ValueError: A shape, axis, range, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> packed = quantize_int4(torch.tensor([1.0, -2.0, 7.0]), torch.tensor(1.0))
        >>> [hex(byte) for byte in packed]
        ['0xe1', '0x7']
    """
    return _quantize_int4(x, scale, zero_point, qmin, qmax, axis, group, block_size, in_memory_order)


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
    """Return the values `(codes - zero_point) * scale` of integers that `quantize_int4` packed.

    `packed` is uint8 of shape ((number of elements + 1) // 2,), `size` the shape of the row-major result; the integers
    are in [-8, 7] if `signed`, else in [0, 15]. The other arguments are `dequantize`'s.

    Raises:
        ValueError: A shape, axis, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> packed = torch.tensor([0xE1, 0x07], dtype=torch.uint8)
        >>> dequantize_int4(packed, [3], torch.tensor(0.5))
        tensor([ 0.5000, -1.0000,  3.5000])
    """
    return _dequantize_int4(packed, size, scale, zero_point, signed, axis, group, block_size, dtype=dtype)
