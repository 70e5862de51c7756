"""The native ops: typed fronts over `torch.ops.qtoolkit`.

Common arguments, of every op here:

- `scale` is a floating point tensor on the input's device, with one element, or with one per channel of `axis`. It counts
  by its magnitude; zero counts as the smallest normal float32.
- `zero_point` has as many elements, or is None (symmetric). It is a code stored as a float, and is rounded where used.
- `axis` is the channel axis; None is per tensor.
- `group` above 1 splits dimension 0 into groups, each with channels of its own: `scale` then has `group * x.size(axis)`
  elements, row-major. This is the weight of a grouped transposed convolution, (in, out / groups, k...).

Arithmetic is float32, and float64 for float64 input, whatever the storage type. Results lie in memory as the input does
(channels_last stays channels_last). The grid is ONNX QuantizeLinear's:
`q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax)`.
"""

import torch
from torch import Tensor

from qtoolkit._native import load

load()

_fake_quant = torch.ops.qtoolkit.fake_quant.default
_fake_quant_float = torch.ops.qtoolkit.fake_quant_float.default
_fake_quant_block = torch.ops.qtoolkit.fake_quant_block.default
_tensor_quant = torch.ops.qtoolkit.tensor_quant.default
_fake_tensor_quant = torch.ops.qtoolkit.fake_tensor_quant.default
_snapshot = torch.ops.qtoolkit.snapshot.default
_quantize = torch.ops.qtoolkit.quantize.default
_dequantize = torch.ops.qtoolkit.dequantize.default
_minmax = torch.ops.qtoolkit.minmax.default
_observe_minmax_ = torch.ops.qtoolkit.observe_minmax_.default
_observe_histogram_ = torch.ops.qtoolkit.observe_histogram_.default
_search_range = torch.ops.qtoolkit.search_range.default


def fake_quant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    grad_factor: float = 1.0,
) -> Tensor:
    """Round x to an integer grid and back to floats, with a straight-through gradient.

    The gradient in x is passed where the code was not clamped, and is zero elsewhere. Where `scale` (or `zero_point`)
    requires grad, it gets the gradient of LSQ (arXiv 1902.08153) and LSQ+ (2004.09576), times `grad_factor`. With a fixed
    scale, one bit an element is kept for backward. NaN stays NaN, infinities clamp.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        scale: Step between codes; see the module's docstring for its shape.
        zero_point: Code that zero maps to, or None for 0.
        qmin: Lowest code.
        qmax: Highest code.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        grad_factor: Factor of the gradients of scale and zero_point.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: A shape, axis, range, group or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> x = torch.tensor([-1.0, 0.04, 0.05, 0.15, 9.0])
        >>> fake_quant(x, torch.tensor(0.1), qmin=-8, qmax=7)
        tensor([-0.8000,  0.0000,  0.0000,  0.2000,  0.7000])
    """
    y: Tensor = _fake_quant(x, scale, zero_point, qmin, qmax, axis, group, grad_factor)[0]
    return y


def fake_quant_float(x: Tensor, scale: Tensor, format: str, axis: int | None = None, group: int = 1) -> Tensor:
    """Round x to a small float format and back, with a straight-through gradient.

    `y = cast(x / scale) * scale`, where the cast rounds half to even and saturates at the format's largest number. NaN
    stays NaN, infinities saturate, denormals of the format are its own, and zeros keep their sign. The gradient in x is
    passed where the cast did not saturate: where x / scale, rounded as if the format's exponents had no end, is at most
    the largest number. It is zero elsewhere. One bit an element is kept for backward.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        scale: What the format's 1 stands for; see the module's docstring for its shape. It has no gradient.
        format: "e4m3" (largest 448, no infinity), "e5m2" (57344) or "e2m1" (6): OCP OFP8 and MX v1.0.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: The format is unknown, or a shape, axis, group or device does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: scale requires grad.

    Example:
        >>> fake_quant_float(torch.tensor([0.2, 0.75, 2.5, -9.0]), torch.tensor(1.0), "e2m1")
        tensor([ 0.,  1.,  2., -6.])
    """
    y: Tensor = _fake_quant_float(x, scale, format, axis, group)[0]
    return y


def fake_quant_block(
    x: Tensor, format: str, block_size: int = 32, scale_format: str = "e8m0", tensor_scale: Tensor | None = None
) -> Tensor:
    """Round x to a small float format and back, with a scale for each block of neighbours in the last dimension.

    The scale follows from the block's largest magnitude, amax; NaN is passed over (and stays NaN itself).

    - `scale_format="e8m0"`: `2^(floor(log2 amax) - emax)`, OCP MX v1.0 (blocks of 32), from 2^-126 to 2^127; emax is the
      format's highest exponent: 8 of e4m3, 15 of e5m2, 2 of e2m1. Elements may saturate.
    - `scale_format="e4m3"`: `e4m3(amax / largest / tensor_scale) * tensor_scale`, NVFP4 with format "e2m1" and blocks of 16;
      `tensor_scale` is usually the tensor's amax / (448 * 6). A scale that rounds to zero gives (almost) zeros.

    The gradient in x is that of `fake_quant_float`, with the scales as constants.

    Args:
        x: Input of one dimension or more; float32, float64, bfloat16 or float16.
        format: "e4m3", "e5m2" or "e2m1".
        block_size: Elements of a block: a multiple of 16 up to 1024 that divides the last dimension.
        scale_format: "e8m0" or "e4m3".
        tensor_scale: One element, or None for 1; with "e4m3" only. It has no gradient.

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
    y: Tensor = _fake_quant_block(x, format, block_size, scale_format, tensor_scale)[0]
    return y


def _check_legacy(x: Tensor, amax: Tensor, unsigned: bool) -> None:
    """Check values, for eager CPU tensors only: on a GPU this would wait for the device, and compilers have no values."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or amax.device.type != "cpu":
        return
    if unsigned and bool((x < 0).any()):
        raise TypeError("Negative values encountered in unsigned quantization.")
    if bool((amax < 0).any()):
        raise ValueError("Negative values in amax")


def tensor_quant(
    x: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return codes, stored as floats, and their multiplier: `tensor_quant` of pytorch-quantization 2.x.

    `q = clamp(round_half_even(x * scale), minb, maxb)` with `scale = maxb / amax`: a multiplier, not ONNX's step. For new
    work take `quantize`, which computes what is deployed. Arithmetic is float32 (float64 for float64). The gradient in x
    is passed where |x| <= amax; amax has none.

    Signs are checked on CPU tensors only, as a GPU would have to be waited for. There, a negative amax counts by its
    magnitude, and negative values are clamped to 0 where unsigned.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        amax: Largest magnitude: one element, or broadcast to x's shape along one dimension. 2^-24 or less gives zeros.
        num_bits: Bits of a code, 2 to 16.
        unsigned: Codes from 0 to 2^num_bits - 1.
        narrow_range: Of signed codes, leave out the lowest.

    Returns:
        The codes, with x's shape, dtype and memory format, and the multiplier, with amax's shape and x's dtype: 1 where
        amax is 2^-24 or less.

    Raises:
        ValueError: amax has negative values, its shape or device or num_bits does not fit, or the multiplier is too large
            for float16.
        TypeError: unsigned and x has negative values, or a dtype does not fit.

    Example:
        >>> tensor_quant(torch.tensor([-1.0, 0.3, 2.0]), torch.tensor(1.0), num_bits=4)
        (tensor([-7.,  2.,  7.]), tensor(7.))
    """
    _check_legacy(x, amax, unsigned)
    codes, scale, _ = _tensor_quant(x, amax, num_bits, unsigned, narrow_range)
    checked = x.dtype == torch.float16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if checked and bool(scale.isinf().any()):
        raise ValueError(f"scale is too large for FP16 with amax={amax}")
    return codes, scale


def fake_tensor_quant(
    x: Tensor, amax: Tensor, num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Round x to an integer grid and back: `fake_tensor_quant` of pytorch-quantization 2.x.

    The codes of `tensor_quant` divided by its multiplier. For new work take `fake_quant`, whose grid is ONNX's. The
    gradient in x is passed where |x| <= amax, of which one bit an element is kept; amax has none.

    Signs are checked on CPU tensors only, as a GPU would have to be waited for; see `tensor_quant`.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        amax: Largest magnitude: one element, or broadcast to x's shape along one dimension. 2^-24 or less gives zeros.
        num_bits: Bits of a code, 2 to 16.
        unsigned: Codes from 0 to 2^num_bits - 1.
        narrow_range: Of signed codes, leave out the lowest.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: amax has negative values, or its shape or device or num_bits does not fit.
        TypeError: unsigned and x has negative values, or a dtype does not fit.

    Example:
        >>> x = torch.tensor([0.5043, 0.8178, 0.4798, 0.9201])
        >>> fake_tensor_quant(x, x.abs().max())
        tensor([0.5071, 0.8187, 0.4782, 0.9201])
    """
    _check_legacy(x, amax, unsigned)
    y: Tensor = _fake_tensor_quant(x, amax, num_bits, unsigned, narrow_range)[0]
    return y


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    dtype: torch.dtype = torch.int8,
) -> Tensor:
    """Return the integer codes of x, as ONNX QuantizeLinear computes them.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16. NaN becomes qmin, as in onnxruntime.
        scale: Step between codes.
        zero_point: Code that zero maps to, or None for 0.
        qmin: Lowest code; must fit `dtype`.
        qmax: Highest code; must fit `dtype`.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        dtype: torch.int8, uint8, int16, uint16 or int32.

    Returns:
        A tensor of `dtype` with the shape and memory format of x.

    Raises:
        ValueError: A shape, axis, range, group or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> quantize(torch.tensor([-1.0, 0.05, 0.15]), torch.tensor(0.1))
        tensor([-10,   0,   2], dtype=torch.int8)
    """
    codes: Tensor = _quantize(x, scale, zero_point, qmin, qmax, axis, group, dtype=dtype)
    return codes


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int | None = None,
    group: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the values `(codes - zero_point) * scale` of integer codes.

    Args:
        codes: int8, uint8, int16, uint16 or int32, of any shape.
        scale: Step between codes.
        zero_point: Code that zero maps to, or None for 0.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        dtype: float32, float64, bfloat16 or float16.

    Returns:
        A tensor of `dtype` with the shape and memory format of codes.

    Raises:
        ValueError: A shape, axis, group or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> dequantize(torch.tensor([-10, 0, 2], dtype=torch.int8), torch.tensor(0.5))
        tensor([-5.,  0.,  1.])
    """
    values: Tensor = _dequantize(codes, scale, zero_point, axis, group, dtype=dtype)
    return values


def snapshot(x: Tensor) -> Tensor:
    """Return a copy of x as it is now, detached, which compilers keep for backward and never compute again.

    torch.compile's partitioner otherwise computes values anew in backward from buffers that the forward has updated in
    place since (seen with batch norm's statistics on torch 2.13 and 2.14: wrong gradients under inductor).

    Example:
        >>> x = torch.zeros(2)
        >>> before = snapshot(x)
        >>> x.add_(1), before
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    copy: Tensor = _snapshot(x)
    return copy


def minmax(x: Tensor, axis: int | None = None, group: int = 1) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of x, per tensor or per channel, in one read of x.

    Args:
        x: Input with at least one element; float32, float64, bfloat16 or float16.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.

    Returns:
        Two tensors of x's dtype, 0-d per tensor, else of `group * x.size(axis)` elements. NaN anywhere in a channel makes
        both its values NaN.

    Raises:
        ValueError: x is empty, or axis or group does not fit.
        TypeError: x is not floating point.

    Example:
        >>> minmax(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), axis=0)
        (tensor([-2.,  3.]), tensor([1., 4.]))
    """
    lo, hi = _minmax(x, axis, group)
    return lo, hi


def observe_minmax_(
    x: Tensor, lo: Tensor, hi: Tensor, momentum: float | None = None, axis: int | None = None, group: int = 1
) -> None:
    """Update running ranges in place with those of x; nothing waits for the device.

    Args:
        x: Input; an empty one changes nothing.
        lo: Lowest values so far, float32 or float64, one a channel; start with +inf.
        hi: Highest values so far; start with -inf.
        momentum: Weight of x's range in a moving average (the convention of batch norm), or None for the overall range.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.

    Raises:
        ValueError: A shape, axis, group, device or the momentum does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> lo, hi = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        >>> observe_minmax_(torch.tensor([1.0, 5.0]), lo, hi)
        >>> observe_minmax_(torch.tensor([-3.0]), lo, hi)
        >>> lo, hi
        (tensor(-3.), tensor(5.))
    """
    _observe_minmax_(x, lo, hi, momentum, axis, group)


def observe_histogram_(x: Tensor, counts: Tensor, lo: Tensor, hi: Tensor) -> None:
    """Add the values of x to a running histogram in place; its range grows by itself, and nothing waits for the device.

    The width of the bins is a power of two. There are two layouts: all bins above zero while nothing negative was seen, as
    many on either side of zero from then on. The width is the smallest that holds all that was seen. So it follows from
    the values alone, and the counts are exactly the same however the data is split into batches, threads or processes.
    Where the range must grow, neighbouring bins are added in pairs: counts move whole.

    To merge histograms exactly (of several processes, say): double the width of the one with the narrower bins, by adding
    its bins in pairs from zero outwards, until both agree; one whose `lo` is 0 has its bins moved up by half of their
    number after its width was doubled, if the other's `lo` is negative; then add the counts.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16. An empty one changes nothing.
        counts: int64 of shape (bins,): an even number of bins, 2 to 2^20; start with zeros. A bin holds the edge that is
            nearer to zero; zero of either sign is in the first bin above zero.
        lo: Lower end of the range that counts covers, float32, one element; start with 0.
        hi: Upper end, likewise. hi <= lo means that nothing was seen. NaN, an infinity or a magnitude of 2^126 or more
            makes both NaN, and from that batch on nothing more is counted.

    Raises:
        ValueError: A shape or device does not fit, or the number of bins is odd or out of range.
        TypeError: A dtype does not fit.

    Example:
        >>> counts, lo, hi = torch.zeros(4, dtype=torch.int64), torch.tensor(0.0), torch.tensor(0.0)
        >>> observe_histogram_(torch.tensor([0.0, 0.1, 0.6, 0.9]), counts, lo, hi)
        >>> counts, lo, hi
        (tensor([2, 0, 1, 1]), tensor(0.), tensor(1.))
        >>> observe_histogram_(torch.tensor([-1.5]), counts, lo, hi)
        >>> counts, lo, hi
        (tensor([1, 0, 4, 0]), tensor(-2.), tensor(2.))
    """
    _observe_histogram_(x, counts, lo, hi)


def search_range(
    counts: Tensor,
    lo: Tensor,
    hi: Tensor,
    qmin: int = -128,
    qmax: int = 127,
    method: str = "mse",
    percentile: float = 99.99,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the range that is best to quantize, chosen from histograms that `observe_histogram_` made.

    What each method takes for the best:

    - "mse": the least squared error of the grid on the centers of the bins, by their counts (pytorch-quantization).
    - "l2": the same with each bin's counts spread evenly over it (what torch.ao's HistogramObserver approximates).
    - "entropy": the least KL divergence between the clipped histogram and its quantized form, as in TensorRT's calibrator
      (S. Migacz, GTC 2017). The bin at zero takes its neighbour's count, as in pytorch-quantization.
    - "percentile": the range that holds `percentile` % of the values, counts being spread evenly within a bin.

    A symmetric range is [-t, t] ([0, t] for codes from 0 up), and every edge of a bin is tried for t. An affine one is
    [-a, b]: a grid of pairs of edges is tried, then the neighbours of the best pair down to single bins; "percentile" cuts
    half of the rest off each end. Of equal ranges the widest is taken. It runs on the CPU (and so waits for a GPU), the
    channels in parallel; about a millisecond for 2048 bins and 8 bits.

    Args:
        counts: int64 of shape (bins,) or (channels, bins).
        lo: Lower ends of the histograms' ranges, float32, one a channel.
        hi: Upper ends.
        qmin: Lowest code, at most 0.
        qmax: Highest code.
        method: "percentile", "mse", "l2" or "entropy".
        percentile: For "percentile": the share of the values to keep, in (0, 100].
        symmetric: Whether the grid has no zero point.

    Returns:
        The lower and upper ends, of the shapes of lo and hi, always around zero. [inf, -inf] for an empty histogram, NaN for
        one that met NaN or infinities, [0, 0] for nothing but zeros.

    Raises:
        ValueError: A shape, device, range, method or percentile does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> counts, lo, hi = torch.zeros(2048, dtype=torch.int64), torch.tensor(0.0), torch.tensor(0.0)
        >>> observe_histogram_(torch.arange(1000) / 1000, counts, lo, hi)
        >>> search_range(counts, lo, hi, method="percentile", percentile=50)
        (tensor(-0.4990), tensor(0.4990))
    """
    low, high = _search_range(counts, lo, hi, qmin, qmax, method, percentile, symmetric)
    return low, high
