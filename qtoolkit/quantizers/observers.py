"""Range estimators, and how a range becomes a scale and a zero point."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.state import KeepsFloat32, LoadsFloatCheckpoints

DEFAULT_MOMENTUM = 0.1


class Observer(KeepsFloat32, LoadsFloatCheckpoints):
    """What a quantizer asks of its observer: to take in tensors, and to give a range."""

    def forward(self, x: Tensor) -> None:
        """Take in the values of x."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values to quantize: lo > hi where nothing was seen, NaN spreads."""
        raise NotImplementedError

    def seen(self) -> bool:
        """Return whether every channel has seen something. Waits for the device."""
        raise NotImplementedError

    def finite(self) -> bool:
        """Return whether all that was seen is finite. Waits for the device."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was seen."""
        raise NotImplementedError

    def resize(self, shape: tuple[int, ...]) -> None:
        """Keep ranges of this shape, where it becomes known by the first input."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what was seen, on the CPU, for `merge` in another process."""
        return {name: buffer.cpu() for name, buffer in self.named_buffers(recurse=False)}

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take what several observers like this one saw, itself among them, for what it saw."""
        raise NotImplementedError


class RangeObserver(Observer):
    """Running minimum and maximum, per tensor or per channel, overall or as a moving average.

    Args:
        shape: Shape of the ranges: () per tensor, else one for each channel or block.
        axis: Channel axis of the inputs.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        block_size: Elements along the axis that share a range, or 0.
        momentum: Weight of each new range in a moving average; None for the range of all that was seen.

    Example:
        >>> observer = RangeObserver()
        >>> observer(torch.tensor([-1.0, 3.0]))
        >>> observer.lo, observer.hi
        (tensor(-1.), tensor(3.))
    """

    lo: Tensor
    hi: Tensor

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        axis: int | None = None,
        group: int = 1,
        block_size: int = 0,
        momentum: float | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.group, self.block_size, self.momentum = axis, group, block_size, momentum
        self.register_buffer("lo", torch.full(shape, torch.inf))
        self.register_buffer("hi", torch.full(shape, -torch.inf))

    def forward(self, x: Tensor) -> None:
        """Take in the range of x."""
        ops.observe_minmax_(x.detach(), self.lo, self.hi, self.momentum, self.axis, self.group, self.block_size)

    def observe_and_quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec) -> Tensor:
        """Take in the range of x, write the grid of the range so far, and return x on it: in one op."""
        codes = (spec.qmin, spec.qmax, self.momentum, spec.pow2_scale)
        return ops.observe_fake_quant(
            x, self.lo, self.hi, scale, zero_point, *codes, self.axis, self.group, self.block_size
        )

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values seen, or their moving averages."""
        return self.lo, self.hi

    def seen(self) -> bool:
        """Return whether every channel has seen something."""
        return not bool((self.lo > self.hi).any())

    def finite(self) -> bool:
        """Return whether all ranges are finite."""
        return bool((torch.isfinite(self.lo) & torch.isfinite(self.hi)).all())

    def reset(self) -> None:
        """Forget what was seen."""
        self.lo.fill_(torch.inf)
        self.hi.fill_(-torch.inf)

    def resize(self, shape: tuple[int, ...]) -> None:
        """Keep ranges of this shape; nothing must have been seen yet."""
        for bound in (self.lo, self.hi):
            bound.data = bound.data.new_full(shape, float(bound.detach().flatten()[0]))

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the range of all ranges, or, of moving averages, their mean."""
        lo, hi = (torch.stack([state[name] for state in states]) for name in ("lo", "hi"))
        if self.momentum is None:
            lo, hi = lo.amin(0), hi.amax(0)
        else:
            seen = ~(lo > hi)
            count = seen.sum(0)
            unseen = torch.full_like(lo[0], torch.inf)
            lo, hi = (torch.where(seen, bound, 0).sum(0) / count for bound in (lo, hi))
            lo, hi = torch.where(count > 0, lo, unseen), torch.where(count > 0, hi, -unseen)
        self.lo.copy_(lo)
        self.hi.copy_(hi)

    def extra_repr(self) -> str:
        """Return the options that are not the default."""
        return "" if self.momentum is None else f"momentum={self.momentum}"


class HistogramObserver(Observer):
    """A running histogram of a tensor, or one for each channel, and the range that a method chooses from it.

    What it counts does not depend on how the data is split into batches (see `qtoolkit.ops.observe_histogram_`).

    Args:
        qmin: Lowest code of the grid that the range is for.
        qmax: Highest code.
        symmetric: Whether the grid has no zero point.
        bins: Number of bins, even.
        method: "percentile", "mse", "l2" or "entropy" (see `qtoolkit.ops.search_range`).
        percentile: Of method "percentile".
        shape: Shape of the ranges: () per tensor, else (channels,).
        axis: Channel axis of the inputs.
        group: Groups of dimension 0 (see `qtoolkit.ops`).

    Example:
        >>> observer = HistogramObserver(method="percentile", percentile=50)
        >>> observer(torch.arange(1000) / 1000)
        >>> observer.range()
        (tensor(-0.4990), tensor(0.4990))
        >>> observer = HistogramObserver(method="percentile", percentile=100, shape=(2,), axis=0)
        >>> observer(torch.tensor([[0.0, 1.0], [0.0, -4.0]]))
        >>> observer.range()[1]
        tensor([1.0010, 4.0078])
    """

    kept_dtypes = (torch.float32, torch.int64)

    counts: Tensor
    lo: Tensor
    hi: Tensor

    def __init__(
        self,
        qmin: int = -128,
        qmax: int = 127,
        symmetric: bool = True,
        bins: int = 2048,
        method: str = "mse",
        percentile: float = 99.99,
        shape: tuple[int, ...] = (),
        axis: int | None = None,
        group: int = 1,
    ) -> None:
        super().__init__()
        self.qmin, self.qmax, self.symmetric = qmin, qmax, symmetric
        self.method, self.percentile = method, percentile
        self.axis, self.group = axis, group
        self.register_buffer("counts", torch.zeros(*shape, bins, dtype=torch.int64))
        self.register_buffer("lo", torch.zeros(shape))
        self.register_buffer("hi", torch.zeros(shape))

    def forward(self, x: Tensor) -> None:
        """Count the values of x."""
        for part, histogram in zip(self._channels_of(x.detach()), _histograms(dict(self.named_buffers())), strict=True):
            ops.observe_histogram_(part, *histogram)

    def _channels_of(self, x: Tensor) -> list[Tensor]:
        """Return the values of each channel, in the order of the ranges."""
        if self.axis is None:
            return [x]
        axis = self.axis % x.dim()
        groups = [x] if self.group == 1 else x.chunk(self.group)
        return [values for part in groups for values in part.unbind(axis)]

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the range that the method chooses. Waits for the device."""
        return ops.search_range(
            self.counts, self.lo, self.hi, self.qmin, self.qmax, self.method, self.percentile, self.symmetric
        )

    def seen(self) -> bool:
        """Return whether in every channel something was counted, or met that cannot be."""
        return not bool((self.hi <= self.lo).any())

    def finite(self) -> bool:
        """Return whether all that was seen could be counted."""
        return bool(torch.isfinite(self.hi).all())

    def reset(self) -> None:
        """Forget what was seen."""
        for buffer in (self.counts, self.lo, self.hi):
            buffer.zero_()

    def resize(self, shape: tuple[int, ...]) -> None:
        """Keep ranges of this shape; nothing must have been seen yet."""
        self.counts.data = self.counts.data.new_zeros(*shape, self.counts.size(-1))
        for bound in (self.lo, self.hi):
            bound.data = bound.data.new_zeros(shape)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Add up the histograms, on the bins that one of all their data has."""
        for mine, *theirs in zip(*map(_histograms, (dict(self.named_buffers()), *states)), strict=True):
            for buffer, value in zip(mine, _sum_of(theirs) or mine, strict=True):
                buffer.copy_(value)

    def extra_repr(self) -> str:
        """Return the method and the number of bins."""
        return f"method={self.method!r}, bins={self.counts.size(-1)}"


Histogram = tuple[Tensor, Tensor, Tensor]  # counts, lo, hi


def _histograms(state: Mapping[str, Tensor]) -> list[Histogram]:
    """Return the histogram of each channel, as views of an observer's buffers."""
    counts, lo, hi = state["counts"], state["lo"], state["hi"]
    if counts.dim() == 1:
        return [(counts, lo, hi)]
    return [(counts[i], lo[i], hi[i]) for i in range(counts.size(0))]


def _sum_of(histograms: Sequence[Histogram]) -> Histogram | None:
    """Return the histogram of the data of several; a broken one where one is, None where none has seen anything."""
    seen = [histogram for histogram in histograms if not bool(histogram[2] <= histogram[1])]
    broken = [histogram for histogram in seen if not bool(torch.isfinite(histogram[2]))]
    if broken or not seen:
        return broken[0] if broken else None
    hi = max(float(hi) for _, _, hi in seen)
    lo = -hi if any(float(lo) < 0 for _, lo, _ in seen) else 0.0
    counts = torch.stack([_on_bins(histogram, lo, hi) for histogram in seen]).sum(0)
    return counts, torch.tensor(lo), torch.tensor(hi)


def _on_bins(histogram: Histogram, lo: float, hi: float) -> Tensor:
    """Return a histogram's counts on wider bins: whole numbers of its own make one of these (csrc/histogram.h)."""
    counts = histogram[0]
    n = counts.numel()
    own_lo, own_hi = float(histogram[1]), float(histogram[2])
    ratio = round((hi - lo) / (own_hi - own_lo))
    numbers = torch.arange(n) - (n // 2 if own_lo < 0 else 0)
    places = torch.div(numbers, ratio, rounding_mode="floor") + (n // 2 if lo < 0 else 0)
    return torch.zeros_like(counts).index_add_(0, places, counts)


def make_observer(spec: QuantSpec, shape: tuple[int, ...], group: int) -> Observer:
    """Build the observer that a spec names, with ranges of this shape."""
    if spec.observer == "histogram":
        codes = (spec.qmin, spec.qmax, spec.symmetric)
        return HistogramObserver(*codes, shape=shape, axis=spec.axis, group=group, **spec.observer_args)
    momentum = spec.observer_args.get("momentum", DEFAULT_MOMENTUM) if spec.observer == "moving_average" else None
    return RangeObserver(shape, spec.axis, group, spec.block_size, momentum)


def grid_of_range(lo: Tensor, hi: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Return the scale, and (for an affine spec) the zero point, whose grid covers the range [lo, hi].

    The rule is `qtoolkit.ops.grid_of_range`'s.

    Args:
        lo: Lowest values, float32, any shape.
        hi: Highest values, the same shape.
        spec: Range of codes, symmetry, powers of two.

    Returns:
        Scale and zero point, of the shape of lo. NaN or infinite ranges give scales that are not finite.

    Example:
        >>> grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), QuantSpec(signed=False, symmetric=False, bits=2))
        (tensor(1.3333), tensor(1.))
    """
    return ops.grid_of_range(lo, hi, spec.qmin, spec.qmax, spec.symmetric, spec.pow2_scale)
