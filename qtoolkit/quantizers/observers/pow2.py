"""Observers that choose a power of two as the scale."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.observers.histogram import HistogramObserver, check_bins, check_no_groups, histogram_of
from qtoolkit.quantizers.observers.minmax import EndsObserver
from qtoolkit.quantizers.spec_ops import ends_of

BINS = 2048
FINER = 8  # the candidates: the smallest power of two that clips nothing, and its halves
POINTS = 4  # the values of a bin count as if they were at this number of points of it
SMALLEST = -126  # the exponent of the smallest scale


class _PowersOfTwo(Observer):
    """The fields of a spec that both observers take."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {"bins": BINS}
    NEEDS: ClassVar[Mapping[str, Any]] = {"format": "int", "symmetric": True, "pow2_scale": True}

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        if any(getattr(spec, name) != value for name, value in cls.NEEDS.items()):
            raise ValueError(
                f"QuantSpec: observer={spec.observer!r} chooses powers of two for integer grids without a zero point; it needs "
                f"format='int', symmetric=True and pow2_scale=True, got {spec.format!r}, {spec.symmetric} and "
                f"{spec.pow2_scale}. Take 'histogram' for other grids."
            )
        check_no_groups(spec)
        check_bins(cls.options(spec)["bins"])


class Pow2Observer(_PowersOfTwo, HistogramObserver):
    """The power of two with the least squared error on the values of all inputs, as the scale.

    The search starts with the smallest power of two that clips nothing, which `QuantSpec.pow2_scale` takes with the observer
    "minmax", and goes down, so that few large values may be clipped. The error is computed on a histogram, whose counts do not
    depend on batches and processes.

    Example:
        >>> observer = Pow2Observer(qt.QuantSpec(bits=4, pow2_scale=True, observer="pow2"))
        >>> observer(torch.linspace(-1, 1, 1000))
        >>> observer.range()  # 7/8 of 1: a range of 14/8 would clip nothing, and round the others twice as far
        (tensor(-0.8750), tensor(0.8750))
    """

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the range of the best scale. Synchronizes with the device."""
        scale = best_power(self.counts, self.lo, self.hi, self.qmin, self.qmax)
        unseen = self.hi <= self.lo
        low, high = ends_of(scale * self.qmax, self.qmin < 0)
        return torch.where(unseen, torch.inf, low), torch.where(unseen, -torch.inf, high)

    def extra_repr(self) -> str:
        return f"bins={self.counts.size(-1)}"


class Pow2ModeObserver(_PowersOfTwo, EndsObserver):
    """The power of two that is the best scale of the most inputs; the larger one of two that are equally frequent.

    The best scale of an input is found as by `Pow2Observer`. A few unusual inputs, however large, do not change the range. Each
    input has one vote; the votes of processes add up. They are not part of the state dict; after loading one, the range is
    of all inputs.

    Example:
        >>> observer = Pow2ModeObserver(qt.QuantSpec(bits=4, pow2_scale=True, observer="pow2_mode"))
        >>> for largest in (1.0, 50.0, 1.0):
        ...     observer(torch.linspace(-largest, largest, 1000))
        >>> observer.range()
        (tensor(-0.8750), tensor(0.8750))
    """

    ADDED_UP = ("votes",)

    votes: Tensor  # for each power of two from 2^SMALLEST on

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        self.qmin, self.qmax, self.bins = spec.qmin, spec.qmax, self.options(spec)["bins"]
        self.votes = torch.zeros(*shape, 1 - 2 * SMALLEST, dtype=torch.int64)

    def forward(self, x: Tensor) -> None:
        super().forward(x)
        self.put_sums_on(x.device)
        counts, lo, hi = histogram_of(x.detach(), self.lo.shape, self.bins, self.axis, self.group)
        scale = best_power(counts, lo, hi, self.qmin, self.qmax)
        counted = (hi > lo) & scale.isfinite()
        exponent = torch.where(counted, scale, 1).log2().round().long()
        place = (exponent - SMALLEST).clamp(0, self.votes.size(-1) - 1).unsqueeze(-1)
        self.votes.scatter_add_(-1, place, counted.long().unsqueeze(-1))

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the range of the most frequent scale."""
        voted = self.votes.sum(-1) > 0
        exponent = self.votes.size(-1) - 1 - self.votes.flip(-1).argmax(-1) + SMALLEST
        lo, hi = ends_of(torch.exp2(exponent.to(self.lo.dtype)) * self.qmax, self.qmin < 0)
        return torch.where(voted, lo, self.lo), torch.where(voted, hi, self.hi)

    def resize(self, shape: tuple[int, ...]) -> None:
        super().resize(shape)
        self.votes = self.votes.new_zeros(*shape, self.votes.size(-1))

    def extra_repr(self) -> str:
        return f"bins={self.bins}"


def best_power(counts: Tensor, lo: Tensor, hi: Tensor, qmin: int, qmax: int) -> Tensor:
    """Return the power of two with the least squared error as the scale of a symmetric grid, for each histogram.

    Counts are int64, (bins,) or (channels, bins). The scale has the shape of lo, NaN for a histogram of NaN or infinities;
    of equal ones it is the largest.
    """
    bins = counts.size(-1)
    steps = (torch.arange(bins * POINTS, device=lo.device) + 0.5) / (bins * POINTS)
    points = lo.reshape(-1, 1) + (hi - lo).reshape(-1, 1) * steps
    weights = counts.reshape(-1, bins).double().repeat_interleave(POINTS, 1)
    filled = weights > 0
    lowest, highest = (torch.where(filled, points, 0).amin(1), torch.where(filled, points, 0).amax(1))
    largest, _ = ops.grid_of_range(lowest, highest, qmin, qmax, True, True)
    candidates = largest * torch.exp2(-torch.arange(FINER, device=lo.device, dtype=largest.dtype)).unsqueeze(1)
    usable = torch.where(candidates.isfinite(), candidates, 1).clamp(min=2.0**SMALLEST)
    rounded = (ops.fake_quant(points, scale, None, qmin, qmax, 0) for scale in usable)
    errors = torch.stack([(weights * (each - points).double().square()).sum(1) for each in rounded])
    best = usable.gather(0, errors.argmin(0, keepdim=True))[0]
    return torch.where(largest.isfinite() & lo.reshape(-1).isfinite(), best, torch.nan).reshape(lo.shape)
