"""Observers: they record the range of the tensors that a quantizer sees."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.errors import check_known
from qtoolkit.quantizers.state import KeepsFloat32, LoadsFloatCheckpoints

if TYPE_CHECKING:  # QuantSpec checks itself by the table of these classes
    from qtoolkit.config import QuantSpec

METHODS = ("percentile", "mse", "l2", "entropy")


class Observer(KeepsFloat32, LoadsFloatCheckpoints):
    """The base class of observers.

    Attributes:
        OPTIONS: The options that `QuantSpec.observer_args` may hold, with their defaults.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def check(cls, spec: "QuantSpec") -> None:
        """Raise ValueError for a spec that this observer does not support, or for an option out of its range."""

    @classmethod
    def options(cls, spec: "QuantSpec") -> dict[str, Any]:
        """Return the value of each option."""
        return {**cls.OPTIONS, **spec.observer_args}

    @classmethod
    def from_spec(cls, spec: "QuantSpec", shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> None:
        """Observe x."""
        raise NotImplementedError

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values to quantize; lo > hi if nothing was observed, NaN if a NaN was."""
        raise NotImplementedError

    def seen(self) -> bool:
        """Return whether every channel has observed something. Synchronizes with the device."""
        raise NotImplementedError

    def finite(self) -> bool:
        """Return whether all observed values are finite. Synchronizes with the device."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard what was observed."""
        raise NotImplementedError

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the ranges, known from the first input. Nothing must have been observed yet."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what was observed, on the CPU, for `merge` in another process."""
        return {name: buffer.cpu() for name, buffer in self.named_buffers(recurse=False)}

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace what was observed by what several observers did; their states include this observer's own."""
        raise NotImplementedError


class RangeObserver(Observer):
    """Running minimum and maximum, per tensor, per channel or per block.

    Args:
        shape: Shape of the ranges: () per tensor, otherwise one element per channel or block.
        axis: Channel axis of the inputs.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        block_size: Elements along the axis that share a range, or 0.
        momentum: Weight of each new range in a moving average; None for the range of all inputs.

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

    @classmethod
    def from_spec(cls, spec: "QuantSpec", shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        return cls(shape, spec.axis, group, spec.block_size, cls.options(spec).get("momentum"))

    def forward(self, x: Tensor) -> None:
        """Observe the range of x."""
        self.blend(x, self.momentum)

    def blend(self, x: Tensor, momentum: float | None) -> None:
        """Observe the range of x with this weight; 1 sets the range to that of x alone."""
        ops.observe_minmax_(x.detach(), self.lo, self.hi, momentum, self.axis, self.group, self.block_size)

    def observe_and_quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: "QuantSpec", momentum: float | None
    ) -> Tensor:
        """Blend x, set scale and zero point from the range so far, and return x quantized with them, in one op."""
        codes = (spec.qmin, spec.qmax, momentum, spec.pow2_scale)
        return ops.observe_fake_quant(
            x, self.lo, self.hi, scale, zero_point, *codes, self.axis, self.group, self.block_size
        )

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values observed, or their moving averages."""
        return self.lo, self.hi

    def seen(self) -> bool:
        """Return whether every channel has observed something."""
        return not bool((self.lo > self.hi).any())

    def finite(self) -> bool:
        """Return whether all ranges are finite."""
        return bool((torch.isfinite(self.lo) & torch.isfinite(self.hi)).all())

    def reset(self) -> None:
        """Discard what was observed."""
        self.lo.fill_(torch.inf)
        self.hi.fill_(-torch.inf)

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the ranges. Nothing must have been observed yet."""
        for bound in (self.lo, self.hi):
            bound.data = bound.data.new_full(shape, float(bound.detach().flatten()[0]))

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the range to the union of the ranges, or to the mean of moving averages."""
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


class LSQStartObserver(RangeObserver):
    """The range of the start of LSQ (arXiv 1902.08153, section 2.1): scale = 2 * mean|x| / sqrt(qmax).

    It is the range of all inputs, multiplied by a factor so that the scale is the paper's; the zero point is that of the
    whole range. It never exceeds the observed range: with many bits, the paper's scale would leave codes unused. What the
    mean needs is not part of the state dict; after loading one, the range is that of all inputs.

    Args:
        qmin: Lowest code of the grid that the range is for.
        qmax: Highest code.
        symmetric: Whether the grid has no zero point.
        shape: Shape of the ranges: () per tensor, otherwise one element per channel or block.
        axis: Channel axis of the inputs.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        block_size: Elements along the axis that share a range, or 0.

    Example:
        >>> observer = LSQStartObserver(qmin=-2, qmax=1)
        >>> observer(torch.tensor([-1.0, -1.0, 1.0, 9.0]))
        >>> observer.range()
        (tensor(-0.6667), tensor(6.))
    """

    kept_dtypes = (torch.float32, torch.float64, torch.int64)

    total: Tensor
    count: Tensor

    def __init__(
        self,
        qmin: int = -128,
        qmax: int = 127,
        symmetric: bool = True,
        shape: tuple[int, ...] = (),
        axis: int | None = None,
        group: int = 1,
        block_size: int = 0,
    ) -> None:
        super().__init__(shape, axis, group, block_size)
        self.qmin, self.qmax, self.symmetric = qmin, qmax, symmetric
        self.register_buffer("total", torch.zeros(shape, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    @classmethod
    def from_spec(cls, spec: "QuantSpec", shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        return cls(spec.qmin, spec.qmax, spec.symmetric, shape, spec.axis, group, spec.block_size)

    def forward(self, x: Tensor) -> None:
        """Observe the range and the magnitudes of x."""
        super().forward(x)
        self.total += self._sums(x.detach().abs()).reshape(self.total.shape)
        self.count += x.numel() // max(self.total.numel(), 1)

    def _sums(self, x: Tensor) -> Tensor:
        """Return the sum of the elements that share a range, in the order of the ranges."""
        if self.axis is None:
            return x.sum(dtype=torch.float64)
        axis = self.axis % x.dim()
        if self.block_size:
            return torch.unflatten(x, axis, (-1, self.block_size)).sum(axis + 1, dtype=torch.float64)
        groups = torch.unflatten(x, 0, (self.group, x.size(0) // self.group)).movedim(axis + 1, 1)
        return groups.flatten(2).sum(2, dtype=torch.float64)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the range of the start, at most the observed one."""
        whole = ops.grid_of_range(self.lo, self.hi, self.qmin, self.qmax, self.symmetric)[0]
        start = 2 * self.total / self.count / self.qmax**0.5
        factor = torch.where(self.count > 0, (start / whole).clamp(max=1), 1).to(self.lo.dtype)
        return self.lo * factor, self.hi * factor

    def reset(self) -> None:
        """Discard what was observed."""
        super().reset()
        self.total.zero_()
        self.count.zero_()

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the ranges. Nothing must have been observed yet."""
        super().resize(shape)
        self.total.data = self.total.data.new_zeros(shape)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the range to the union of the ranges, and the mean to that of all inputs."""
        super().merge(states)
        for name, buffer in (("total", self.total), ("count", self.count)):
            buffer.copy_(torch.stack([state[name] for state in states]).sum(0))


class MovingAverageObserver(RangeObserver):
    """Moving average of the minimum and maximum; option `momentum` is the weight of each new range."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {"momentum": 0.1}

    @classmethod
    def check(cls, spec: "QuantSpec") -> None:
        """Raise ValueError for a momentum outside (0, 1]."""
        momentum = cls.options(spec)["momentum"]
        if not isinstance(momentum, int | float) or not 0 < momentum <= 1:
            raise ValueError(f"QuantSpec: momentum must lie in (0, 1], got {momentum!r}.")


class HistogramObserver(Observer):
    """A running histogram, per tensor or per channel, and the range that a method chooses from it.

    The counts do not depend on how the data is split into batches (see `qtoolkit.ops.observe_histogram_`).

    Args:
        qmin: Lowest code of the grid that the range is for.
        qmax: Highest code.
        symmetric: Whether the grid has no zero point.
        bins: Number of bins, even.
        method: "percentile", "mse", "l2" or "entropy" (see `qtoolkit.ops.search_range`).
        percentile: Percentage of the values inside the range; for method "percentile".
        shape: Shape of the ranges: () per tensor, (channels,) per channel.
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

    OPTIONS: ClassVar[Mapping[str, Any]] = {"bins": 2048, "method": "mse", "percentile": 99.99}
    kept_dtypes = (torch.float32, torch.int64)

    counts: Tensor
    lo: Tensor
    hi: Tensor

    def __init__(
        self,
        qmin: int = -128,
        qmax: int = 127,
        symmetric: bool = True,
        bins: int = OPTIONS["bins"],
        method: str = OPTIONS["method"],
        percentile: float = OPTIONS["percentile"],
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

    @classmethod
    def check(cls, spec: "QuantSpec") -> None:
        """Raise ValueError for groups, for a format that the methods do not know, or for an option out of its range."""
        options = cls.options(spec)
        bins, method, percentile = options["bins"], options["method"], options["percentile"]
        if spec.format != "int" and method != "percentile":
            raise ValueError(
                f"QuantSpec: format={spec.format!r} needs another observer than 'histogram', whose methods other than "
                f"'percentile' search the best integer grid; take 'minmax' or observer_args={{'method': 'percentile'}}."
            )
        if spec.group_size is not None:
            raise ValueError(
                f"QuantSpec: observer='histogram' needs group_size=None, got {spec.group_size}; take 'minmax' for a scale "
                f"per group."
            )
        if type(bins) is not int or bins % 2 or not 2 <= bins <= 1 << 20:
            raise ValueError(f"QuantSpec: bins must be an even number from 2 to {1 << 20}, got {bins!r}.")
        check_known("method of observer 'histogram'", method, METHODS)
        if not isinstance(percentile, int | float) or not 0 < percentile <= 100:
            raise ValueError(f"QuantSpec: percentile must lie in (0, 100], got {percentile!r}.")

    @classmethod
    def from_spec(cls, spec: "QuantSpec", shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        options = cls.options(spec)
        return cls(spec.qmin, spec.qmax, spec.symmetric, shape=shape, axis=spec.axis, group=group, **options)

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
        """Return the range that the method chooses. Synchronizes with the device."""
        return ops.search_range(
            self.counts, self.lo, self.hi, self.qmin, self.qmax, self.method, self.percentile, self.symmetric
        )

    def seen(self) -> bool:
        """Return whether every channel has observed something, finite or not."""
        return not bool((self.hi <= self.lo).any())

    def finite(self) -> bool:
        """Return whether all observed values are finite."""
        return bool(torch.isfinite(self.hi).all())

    def reset(self) -> None:
        """Discard what was observed."""
        for buffer in (self.counts, self.lo, self.hi):
            buffer.zero_()

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the ranges. Nothing must have been observed yet."""
        self.counts.data = self.counts.data.new_zeros(*shape, self.counts.size(-1))
        for bound in (self.lo, self.hi):
            bound.data = bound.data.new_zeros(shape)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the histogram to the sum of the histograms, with the bins that a histogram of all the data has."""
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
    """Return the sum of several histograms: one with values that are not finite if there is any, None if all are empty."""
    seen = [histogram for histogram in histograms if not bool(histogram[2] <= histogram[1])]
    not_finite = [histogram for histogram in seen if not bool(torch.isfinite(histogram[2]))]
    if not_finite or not seen:
        return not_finite[0] if not_finite else None
    hi = max(float(hi) for _, _, hi in seen)
    lo = -hi if any(float(lo) < 0 for _, lo, _ in seen) else 0.0
    counts = torch.stack([_on_bins(histogram, lo, hi) for histogram in seen]).sum(0)
    return counts, torch.tensor(lo), torch.tensor(hi)


def _on_bins(histogram: Histogram, lo: float, hi: float) -> Tensor:
    """Return a histogram's counts on wider bins, each the union of whole bins of its own (csrc/histogram.h)."""
    counts = histogram[0]
    n = counts.numel()
    own_lo, own_hi = float(histogram[1]), float(histogram[2])
    ratio = round((hi - lo) / (own_hi - own_lo))
    numbers = torch.arange(n) - (n // 2 if own_lo < 0 else 0)
    places = torch.div(numbers, ratio, rounding_mode="floor") + (n // 2 if lo < 0 else 0)
    return torch.zeros_like(counts).index_add_(0, places, counts)
