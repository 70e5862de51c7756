"""Ranges and histograms of tensors, the range to quantize for a histogram, and the grid for a range."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from qtoolkit._native import TupleOp, library

_grid_of_range = library.grid_of_range.default
_minmax = library.minmax.default
_observe_fake_quant: TupleOp = library.observe_fake_quant.default
_observe_histogram_ = library.observe_histogram_.default
_observe_minmax_ = library.observe_minmax_.default
_search_range = library.search_range.default
_take_range_ = library.take_range_.default

RangeMethod = Literal["mse", "l2", "entropy", "percentile"]


def minmax(x: Tensor, axis: int | None = None, group: int = 1, block_size: int = 0) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest values of x, per tensor, per channel or per block, in one read of x.

    Args:
        x: Input with at least one element; float32, float64, bfloat16 or float16.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a range, or 0 for no blocks.

    Returns:
        Two tensors of x's dtype: 0-d per tensor, of `group * x.size(axis)` elements per channel, of x's shape with dimension
        `axis` divided by `block_size` per block. If a channel has NaN, both its values are NaN.

    Raises:
        ValueError: x is empty, or axis, group or block size does not fit.
        TypeError: x is not floating point.

    Example:
        >>> minmax(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), axis=0)
        (tensor([-2.,  3.]), tensor([1., 4.]))
    """
    lo, hi = _minmax(x, axis, group, block_size)
    return lo, hi


def observe_minmax_(
    x: Tensor,
    lo: Tensor,
    hi: Tensor,
    momentum: float | None = None,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    skipped: Tensor | None = None,
) -> None:
    """Update running ranges in place with x's, without waiting for the device.

    Args:
        x: Input; an empty one changes nothing.
        lo: Lowest values observed, float32 or float64, one per channel (or block, row-major); start with +inf.
        hi: Highest values observed; start with -inf.
        momentum: Weight of x's range in a moving average (the convention of batch norm), which begins with the first range
            that is not [0, 0]; or None for the overall range.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a range, or 0 for no blocks.
        skipped: int64, as many elements as lo: counts the ranges of x with NaN or infinities, which are not taken in. None
            takes them in.

    Raises:
        ValueError: A shape, axis, group, block size, device or the momentum does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> lo, hi = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        >>> observe_minmax_(torch.tensor([1.0, 5.0]), lo, hi)
        >>> observe_minmax_(torch.tensor([-3.0]), lo, hi)
        >>> lo, hi
        (tensor(-3.), tensor(5.))
    """
    _observe_minmax_(x, lo, hi, momentum, axis, group, block_size, skipped)


def grid_of_range(
    lo: Tensor, hi: Tensor, qmin: int = -128, qmax: int = 127, symmetric: bool = True, pow2_scale: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the scale and zero point whose grid covers the range [lo, hi].

    The range is widened to include zero, which is always representable. Symmetric: scale = max(|lo|, |hi|) / qmax (for
    integers from 0 up: hi / qmax). Affine: scale = (hi - lo) / (qmax - qmin), zero_point = qmin - round_half_even(lo / scale),
    in [qmin, qmax]. The scale is at least the smallest normal float32. A range of zero width, which any scale covers, gets
    the largest scale of the others, or 1 if there are none.

    Args:
        lo: Lowest values, float32 or float64, any shape.
        hi: Highest values, of the same shape and dtype.
        qmin: Lowest quantized value.
        qmax: Highest quantized value; positive if symmetric.
        symmetric: Whether the grid has no zero point.
        pow2_scale: Round the scale up to a power of two.

    Returns:
        Scale, and zero point or None, of the shape and dtype of lo. NaN or infinite ranges give scales that are not finite;
        an initial range, [+inf, -inf], counts as one of zero width.

    Raises:
        ValueError: A shape, device or range of integers does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), 0, 3, symmetric=False)
        (tensor(1.3333), tensor(1.))
    """
    scale, zero_point = _grid_of_range(lo, hi, qmin, qmax, symmetric, pow2_scale)
    return scale, None if symmetric else zero_point


def take_range_(
    lo: Tensor,
    hi: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    count: Tensor,
    clock: Tensor,
    qmin: int = -128,
    qmax: int = 127,
    steps: int = 200,
    pow2_scale: bool = False,
) -> None:
    """Let a grid follow a range in the first steps of a training; a grid stays as it is within a step.

    The first call after the clock has moved counts a step. If it is among the first `steps`, scale and zero point become
    what `grid_of_range` returns, except in channels without a range, where lo > hi or one of them is NaN. Nothing waits for
    the device.

    Args:
        lo: Lowest values, float32 or float64, any shape.
        hi: Highest values, of the same shape and dtype.
        scale: As many elements as lo, of its dtype, changed in place.
        zero_point: Like scale, changed in place, or None for a symmetric grid.
        count: The clock's value at the last call, and the number of steps; int64, changed in place.
        clock: The clock, one element, int64.
        qmin: Lowest quantized value.
        qmax: Highest quantized value; positive if symmetric.
        steps: Number of steps in which the grid follows the range.
        pow2_scale: Round the scale up to a power of two.

    Raises:
        ValueError: A shape, device or range of integers does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> scale, count = torch.tensor(1.0), torch.tensor([0, 0])
        >>> for clock, hi in ((0, 127.0), (1, 254.0), (2, 508.0)):
        ...     take_range_(torch.tensor(-1.0), torch.tensor(hi), scale, None, count, torch.tensor(clock), steps=1)
        ...     scale.item(), count.tolist()
        (1.0, [0, 0])
        (2.0, [1, 1])
        (2.0, [2, 2])
    """
    _take_range_(lo, hi, scale, zero_point, count, clock, qmin, qmax, steps, pow2_scale)


def observe_fake_quant(
    x: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    momentum: float | None = None,
    pow2_scale: bool = False,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    skipped: Tensor | None = None,
    *,
    float16: bool = False,
) -> Tensor:
    """Observe x, update the grid from the new range, and round x to it: training with moving ranges, in one op.

    Results and arguments are the same as of `observe_minmax_`, `grid_of_range` and `fake_quant`, bit for bit. lo, hi,
    scale and zero_point (None for a symmetric grid) are updated in place; scale and zero_point have lo's dtype and number of
    elements. With `float16`, `float16_scale` of the new scale quantizes, and the scale is stored as it is. The result has the
    shape, dtype and memory format of x. The gradient in x is straight-through on the new grid. The
    op does not wait for the device. Without `skipped`, NaN or infinities in x propagate to the range and the scale.

    Raises:
        ValueError: A shape, axis, group, range of integers, device or the momentum does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: lo, hi, scale or zero_point requires grad.

    Example:
        >>> lo, hi, scale = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.tensor(torch.nan)
        >>> observe_fake_quant(torch.tensor([-1.4, 0.6, 7.0]), lo, hi, scale, qmin=-8, qmax=7)
        tensor([-1.,  1.,  7.])
        >>> lo, hi, scale
        (tensor(-1.4000), tensor(7.), tensor(1.))
    """
    codes, channels = (qmin, qmax, momentum, pow2_scale, float16), (axis, group, block_size)
    return _observe_fake_quant(x, lo, hi, scale, zero_point, *codes, *channels, skipped)[0]


def observe_histogram_(
    x: Tensor, counts: Tensor, lo: Tensor, hi: Tensor, axis: int | None = None, group: int = 1
) -> None:
    """Add the values of x to a running histogram in place, which widens its range as needed, without waiting for the device.

    With an axis, each channel has a histogram of its own.

    The width of the bins is a power of two. There are two layouts: all bins are above zero while all values were
    non-negative; after that, half of them are on each side of zero. The width is the smallest one that holds all values.
    So it depends on the set of values only, and the counts are exactly the same for any split of the data into batches,
    threads or processes. To widen the range, adjacent bins are added in pairs; no count is divided.

    To double the width of a histogram, add its bins in pairs from zero outwards. To merge two histograms exactly (of two
    processes, for example): if `lo` of one is 0 and of the other negative, double the width of the first and shift
    its bins up by half of their number; then double the smaller width until both agree, and add the counts.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16. An empty one changes nothing.
        counts: int64 of shape (bins,), or (channels, bins): an even number of bins, 2 to 2^20; start with zeros. A bin
            includes its edge nearer to zero; zero of either sign is in the first bin above zero.
        lo: Lowest value of the range that counts covers, float32, one element per histogram; start with 0.
        hi: Highest value, likewise. hi <= lo means that no value was counted. NaN, an infinity or a magnitude of 2^126 or more
            makes both NaN, and later values are not counted.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.

    Raises:
        ValueError: A shape, axis, group or device does not fit, or the number of bins is odd or out of range.
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
    _observe_histogram_(x, counts, lo, hi, axis, group)


def search_range(
    counts: Tensor,
    lo: Tensor,
    hi: Tensor,
    qmin: int = -128,
    qmax: int = 127,
    method: RangeMethod = "mse",
    percentile: float = 99.99,
    symmetric: bool = True,
    candidates: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the best range to quantize, for histograms from `observe_histogram_`.

    The criteria of the methods:

    - "mse": the least squared error of the grid on the centers of the bins, by their counts (pytorch-quantization).
    - "l2": the same with each bin's counts spread evenly over it (what torch.ao's HistogramObserver approximates).
    - "entropy": the least KL divergence between the clipped histogram and its quantized form, as in TensorRT's calibrator
      (S. Migacz, GTC 2017). The bin at zero takes the count of its neighbour, as in pytorch-quantization. Only
      ranges with at least as many filled bins as levels are compared (or the range of all values, if there are fewer): a
      smaller one has no divergence, even if it clips.
    - "percentile": the range that holds `percentile` % of the values, with counts spread evenly within a bin.

    A symmetric range is [-t, t] ([0, t] for integers from 0 up); every edge of a bin is a candidate for t. An affine range is
    [-a, b]: the search tries a grid of pairs of edges, then the neighbours of the best pair down to single bins;
    "percentile" removes half of the rest on each side. Of equal ranges the widest is chosen. The op runs on the CPU (it
    waits for a GPU), with channels in parallel, in about a millisecond for 2048 bins and 8 bits.

    Args:
        counts: int64 of shape (bins,) or (channels, bins), an even number of bins, 2 to 2^24.
        lo: Lowest values of the histograms' ranges, float32, one per channel.
        hi: Highest values.
        qmin: Lowest quantized value, at most 0.
        qmax: Highest quantized value.
        method: "percentile", "mse", "l2" or "entropy".
        percentile: For "percentile": the share of the values to keep, in (0, 100].
        symmetric: Whether the grid has no zero point.
        candidates: For "entropy" with a symmetric grid: the values of t to compare, as numbers of bins from zero. All of them
            are compared, even if t spans fewer bins than there are levels. Empty: every edge.

    Returns:
        The lowest and highest values, of the shapes of lo and hi, with zero between them. [inf, -inf] for an empty histogram,
        NaN for a histogram of NaN or infinities, [0, 0] if all values were zero.

    Raises:
        ValueError: A shape, device, range, method, percentile or candidate does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> counts, lo, hi = torch.zeros(2048, dtype=torch.int64), torch.tensor(0.0), torch.tensor(0.0)
        >>> observe_histogram_(torch.arange(1000) / 1000, counts, lo, hi)
        >>> search_range(counts, lo, hi, method="percentile", percentile=50)
        (tensor(-0.4990), tensor(0.4990))
    """
    low, high = _search_range(counts, lo, hi, qmin, qmax, method, percentile, symmetric, candidates)
    return low, high
