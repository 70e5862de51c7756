"""Observers that choose a range from a histogram by a method: of all inputs, or a moving average of each input's range."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_known
from qtoolkit.instead import RANGES
from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.observers.minmax import EndsObserver, check_momentum
from qtoolkit.running import running

METHODS = ("percentile", "mse", "l2", "entropy")


def check_histogram(spec: QuantSpec, options: Mapping[str, Any]) -> None:
    """Raise ValueError for groups, for a format that the methods do not know, or for an option out of its range."""
    bins, method, percentile = options["bins"], options["method"], options["percentile"]
    if spec.format != "int" and method != "percentile":
        raise ValueError(
            f"QuantSpec: format={spec.format!r} needs another observer than {spec.observer!r}, whose methods other than "
            f"'percentile' search the best integer grid; take 'minmax' or observer_args={{'method': 'percentile'}}."
        )
    check_no_groups(spec)
    check_bins(bins)
    check_known(f"method of observer {spec.observer!r}", method, METHODS, RANGES)
    if not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise ValueError(f"QuantSpec: percentile must lie in (0, 100], got {percentile!r}.")


def check_no_groups(spec: QuantSpec) -> None:
    """Raise ValueError for a scale per group: histograms are per tensor or per channel."""
    if spec.group_size is not None:
        raise ValueError(
            f"QuantSpec: observer={spec.observer!r} needs group_size=None, got {spec.group_size}; take 'minmax' for a scale "
            f"per group."
        )


def check_bins(bins: object) -> None:
    """Raise ValueError for a number of bins that histograms do not have."""
    if type(bins) is not int or bins % 2 or not 2 <= bins <= 1 << 20:
        raise ValueError(f"QuantSpec: bins must be an even number from 2 to {1 << 20}, got {bins!r}.")


def empty_histogram(shape: tuple[int, ...], bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts and the ranges of histograms without values."""
    lo, hi = (torch.zeros(shape, dtype=torch.float32) for _ in range(2))
    return torch.zeros(*shape, bins, dtype=torch.int64), lo, hi


def histogram_of(
    x: Tensor, shape: tuple[int, ...], bins: int, axis: int | None, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts and the range of the histogram of one tensor."""
    counts, lo, hi = (each.to(x.device) for each in empty_histogram(shape, bins))
    ops.observe_histogram_(x, counts, lo, hi, axis, group)
    return counts, lo, hi


def searched_codes(spec: QuantSpec) -> tuple[int, int]:
    """Return a range of as many integers as a spec has, with 0 among them: the search of an affine range needs no more."""
    above = max(spec.qmin, 0)
    return spec.qmin - above, spec.qmax - above


class HistogramObserver(Observer):
    """A running histogram, per tensor or per channel, and the range that a method chooses from it.

    The counts do not depend on how the data is split into batches (see `qtoolkit.ops.observe_histogram_`).

    Attributes:
        qmin: Lowest integer of the grid that the range is for, at most 0.
        qmax: Highest integer.
        method: "percentile", "mse", "l2" or "entropy" (see `qtoolkit.ops.search_range`).
        percentile: Percentage of the values inside the range; for method "percentile".

    Example:
        >>> options = {"method": "percentile", "percentile": 50}
        >>> observer = HistogramObserver(qt.QuantSpec(observer="histogram", observer_args=options))
        >>> observer(torch.arange(1000) / 1000)
        >>> observer.range()
        (tensor(-0.4990), tensor(0.4990))
        >>> options["percentile"] = 100
        >>> observer = HistogramObserver(qt.QuantSpec(axis=0, observer="histogram", observer_args=options), (2,))
        >>> observer(torch.tensor([[0.0, 1.0], [0.0, -4.0]]))
        >>> observer.range()[1]
        tensor([1.0010, 4.0078])
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"bins": 2048, "method": "mse", "percentile": 99.99}
    ADDED_UP = ("counts", "lo", "hi")

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        options = {**HistogramObserver.OPTIONS, **self.options(spec)}  # a subclass may have another method than these
        self.qmin, self.qmax, self.symmetric = *searched_codes(spec), spec.symmetric
        self.method, self.percentile = options["method"], options["percentile"]
        self.counts, self.lo, self.hi = empty_histogram(shape, options["bins"])
        self.skipped = 0

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        check_histogram(spec, cls.options(spec))

    def forward(self, x: Tensor) -> None:
        """Count the values of x. In training, an input with NaN or infinities is counted in `skipped` alone.

        A compiled forward, which must not wait for the device, takes it in; then the range is NaN.
        """
        self.put_sums_on(x.device)
        if self.training and not running().compiled and not _is_finite(x.detach()):
            self.skipped += 1
        else:
            ops.observe_histogram_(x.detach(), self.counts, self.lo, self.hi, self.axis, self.group)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the range that the method chooses. Synchronizes with the device."""
        return ops.search_range(
            self.counts, self.lo, self.hi, self.qmin, self.qmax, self.method, self.percentile, self.symmetric
        )

    def observed(self) -> tuple[Tensor, Tensor]:
        """Return the outer edges of the first and the last bin that hold a value."""
        filled, edges = self.counts > 0, self._edges()
        lowest = torch.where(filled, edges[..., :-1], torch.inf).amin(-1)
        highest = torch.where(filled, edges[..., 1:], -torch.inf).amax(-1)
        return lowest, highest

    def share_outside(self, lo: Tensor, hi: Tensor) -> float:
        """Return the share of the observed values in the bins whose centers are outside [lo, hi]."""
        edges = self._edges()
        centers = (edges[..., :-1] + edges[..., 1:]) / 2
        lo, hi = (end.reshape(*self.lo.shape, 1) for end in (lo, hi))
        outside = (centers < lo) | (centers > hi)
        return float(self.counts[outside].sum() / self.counts.sum())

    def _edges(self) -> Tensor:
        """Return the edges of the bins, (..., bins + 1)."""
        steps = torch.linspace(0, 1, self.counts.size(-1) + 1, device=self.lo.device)
        return self.lo.unsqueeze(-1) + (self.hi - self.lo).unsqueeze(-1) * steps

    def seen(self) -> bool:
        return not bool((self.hi <= self.lo).any())

    def finite(self) -> bool:
        return not self.skipped and bool(torch.isfinite(self.hi).all())

    def reset(self) -> None:
        self.skipped = 0
        self.reset_added_up()

    def resize(self, shape: tuple[int, ...]) -> None:
        self.counts = self.counts.new_zeros(*shape, self.counts.size(-1))
        self.lo, self.hi = self.lo.new_zeros(shape), self.hi.new_zeros(shape)

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the histogram to the sum of the histograms, with the bins that a histogram of all the data has."""
        for mine, *theirs in zip(*map(_histograms, (self.added_up(), *states)), strict=True):
            for buffer, value in zip(mine, _sum_of(theirs) or mine, strict=True):
                buffer.copy_(value)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, bins={self.counts.size(-1)}"


class MovingHistogramObserver(EndsObserver):
    """Moving average of the range that a method chooses from the histogram of each input, at most the input's own range.

    The first input that is not all zeros gives the first range. Each input is searched, which waits for a GPU; see
    `HistogramObserver` for the range of all inputs. Processes have the mean of their averages.

    Example:
        >>> options = {"momentum": 0.5, "method": "percentile", "percentile": 100}
        >>> observer = MovingHistogramObserver(qt.QuantSpec(observer="moving_histogram", observer_args=options))
        >>> observer(torch.tensor([0.0, 4.0]))
        >>> observer(torch.tensor([0.0, 8.0]))
        >>> observer.range()
        (tensor(0.), tensor(6.))
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"momentum": 0.1, **HistogramObserver.OPTIONS}

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        options = self.options(spec)
        self.qmin, self.qmax, self.symmetric = *searched_codes(spec), spec.symmetric
        self.bins, self.method, self.percentile = options["bins"], options["method"], options["percentile"]

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        check_momentum(cls.options(spec)["momentum"])
        check_histogram(spec, cls.options(spec))

    def forward(self, x: Tensor) -> None:
        """Choose the range of x, and take it into the average."""
        x = x.detach()
        if x.numel() == 0:
            return
        counts, lo, hi = histogram_of(x, self.lo.shape, self.bins, self.axis, self.group)
        grid = (self.qmin, self.qmax, self.method, self.percentile, self.symmetric)
        lo, hi = ops.search_range(counts, lo, hi, *grid)
        lowest, highest = (end.to(lo).reshape(lo.shape) for end in ops.minmax(x, self.axis, self.group))
        bounds = torch.stack((lo.maximum(lowest), hi.minimum(highest)), -1)  # NaN stays, and is skipped
        axis = None if self.axis is None else 0
        ops.observe_minmax_(bounds, self.lo, self.hi, self.momentum, axis, skipped=self.skipped)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, bins={self.bins}, momentum={self.momentum}"


def _is_finite(x: Tensor) -> bool:
    return x.numel() == 0 or bool(torch.stack(ops.minmax(x)).isfinite().all())


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
