"""Small float formats and a logarithmic format, with a scale per tensor, per channel or per block."""

from typing import Literal

from torch import Tensor

from qtoolkit._native import TupleOp, library
from qtoolkit.ops.recording import check_has_form, recorded
from qtoolkit.running import running

_fake_quant_block: TupleOp = library.fake_quant_block.default
_fake_quant_float: TupleOp = library.fake_quant_float.default


def fake_quant_float(
    x: Tensor, scale: Tensor, format: str, axis: int | None = None, group: int = 1, block_size: int = 0
) -> Tensor:
    """Round x to a small float format, or onto a logarithmic grid, and back, with a straight-through gradient.

    `y = cast(x / scale) * scale`, where the cast rounds half to even and saturates at the format's largest number. NaN
    stays NaN, infinities saturate, the format's denormals are representable, and zeros keep their sign. The gradient in x
    passes where the cast did not saturate, that is, where x / scale, rounded with unlimited exponents, is at most the
    largest number; elsewhere it is zero. One bit per element is saved for backward.

    The format "nnie" is the logarithmic one of HiSilicon's NNIE (as in MQBench 0.0.6): `y = sign(x) * 2^(n / 16)` with
    `n = clamp(round(16 * log2(|x|)), top - 127, top)` and `top = round(16 * log2(scale))`, so the scale is the largest
    number; for negative x the lowest n is one more. Magnitudes up to half the lowest number of their sign become 0. The
    gradient passes where n is at most `top`, also at 0 (MQBench passes it everywhere). The scale is clamped to the range
    from 2^-117 to 2^126 (2^1022 for float64).

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        scale: The value of the format's 1; see the module's docstring for its shape. It has no gradient.
        format: "e4m3" (largest 448, no infinity), "e5m2" (57344) or "e2m1" (6): OCP OFP8 and MX v1.0; or "nnie" (1).
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: The format is unknown, or a shape, axis, group, block size or device does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: scale requires grad.

    Example:
        >>> fake_quant_float(torch.tensor([0.2, 0.75, 2.5, -9.0]), torch.tensor(1.0), "e2m1")
        tensor([ 0.,  1.,  2., -6.])
        >>> fake_quant_float(torch.tensor([1.0, 0.7, -0.02, 0.001]), torch.tensor(1.0), "nnie")
        tensor([ 1.0000,  0.7071, -0.0203,  0.0000])
    """
    run = running()
    if run.recorded:
        form = recorded(run, x, scale, None, format, (0, 0), axis, group, block_size)
        if form is not None:
            return form
    return _fake_quant_float(x, scale, format, axis, group, block_size)[0]


def fake_quant_block(
    x: Tensor,
    format: str,
    block_size: int = 32,
    scale_format: Literal["e8m0", "e4m3"] = "e8m0",
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Round x to a small float format and back, with a scale for each block of neighbours in the last dimension.

    The scale is computed from the block's largest magnitude, amax.

    - `scale_format="e8m0"`: `2^(floor(log2 amax) - emax)`, OCP MX v1.0 (blocks of 32), from 2^-126 to 2^127; emax is the
      format's highest exponent: 8 for e4m3, 15 for e5m2, 2 for e2m1. Elements may saturate. With NaN or an infinity in a block
      the scale is NaN, and so are all its elements.
    - `scale_format="e4m3"`: `e4m3(amax / largest / tensor_scale) * tensor_scale`, NVFP4 with format "e2m1" and blocks of 16;
      `tensor_scale` is usually the tensor's amax / (448 * 6). A scale that rounds to zero gives (almost) zeros. amax ignores
      NaN, which stays NaN.

    The gradient in x is `fake_quant_float`'s, with the scales as constants.

    Args:
        x: Input of one dimension or more; float32, float64, bfloat16 or float16.
        format: "e4m3", "e5m2" or "e2m1".
        block_size: Elements of a block: a multiple of 16 up to 1024 that divides the last dimension.
        scale_format: "e8m0" or "e4m3".
        tensor_scale: One element, or None for 1; only with "e4m3". It has no gradient.

    Returns:
        A row-major tensor with the shape and dtype of x.

    Raises:
        ValueError: A format is unknown, or a size, shape or device does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: tensor_scale requires grad.

    Example:
        >>> x = torch.tensor([0.3, -1.0, 3.1, 13.0]).repeat(8)
        >>> fake_quant_block(x, "e2m1")[:4]
        tensor([ 0., -1.,  3., 12.])
    """
    check_has_form(f"a scale for each block that is computed from the input (format={format!r})")
    return _fake_quant_block(x, format, block_size, scale_format, tensor_scale)[0]
