"""Observers of the lowest and highest values: of all inputs, or a moving average."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.state import scale_dtype


class EndsObserver(Observer):
    """The base class of the observers that keep the lowest and the highest value, per tensor, per channel or per block.

    An input with NaN or infinities in a channel does not change that channel's range; it is counted in `skipped`.

    Attributes:
        momentum: Weight of each new range in a moving average; None for the range of all inputs.
    """

    lo: Tensor
    hi: Tensor
    skipped: Tensor

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        self.momentum: float | None = self.options(spec).get("momentum")
        self.register_buffer("lo", torch.full(shape, torch.inf, dtype=scale_dtype()))
        self.register_buffer("hi", torch.full(shape, -torch.inf, dtype=scale_dtype()))
        self.register_buffer("skipped", torch.zeros(shape, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> None:
        channels = (self.axis, self.group, self.block_size)
        ops.observe_minmax_(x.detach(), self.lo, self.hi, self.momentum, *channels, self.skipped)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest values observed, or their moving averages."""
        return self.lo, self.hi

    def observed(self) -> tuple[Tensor, Tensor]:
        return self.lo, self.hi

    def share_outside(self, lo: Tensor, hi: Tensor) -> float | None:
        """Return 0 if the range lies in [lo, hi], else None; a moving average does not tell."""
        return None if self.momentum is not None else super().share_outside(lo, hi)

    def seen(self) -> bool:
        return not bool((self.lo > self.hi).any())

    def finite(self) -> bool:
        return not bool(self.skipped.any())

    def reset(self) -> None:
        self.lo.fill_(torch.inf)
        self.hi.fill_(-torch.inf)
        self.skipped.zero_()
        self.reset_added_up()

    def resize(self, shape: tuple[int, ...]) -> None:
        for bound in (self.lo, self.hi, self.skipped):
            bound.data = bound.data.new_full(shape, float(bound.detach().flatten()[0]))

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the range to the union of the ranges, or to the mean of moving averages; add up the sums."""
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
        self.skipped.copy_(torch.stack([state["skipped"] for state in states]).sum(0))
        for name, sums in self.added_up().items():
            sums.copy_(self.sum_of([state[name] for state in states]))

    def sum_of(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the total of several observers' sums."""
        return torch.stack(list(sums)).sum(0)

    def extra_repr(self) -> str:
        return "" if self.momentum is None else f"momentum={self.momentum}"


class RangeObserver(EndsObserver):
    """Running minimum and maximum, per tensor, per channel or per block.

    Its range can follow one tensor, in the same read that quantizes it.
    """

    def follow(self, x: Tensor) -> None:
        """Set the range to x's alone; NaN and infinities propagate."""
        ops.observe_minmax_(x.detach(), self.lo, self.hi, 1.0, self.axis, self.group, self.block_size)

    def average(self, x: Tensor, momentum: float) -> None:
        """Take the range of x into a moving average with the present range, with this weight or the observer's own."""
        channels, momentum = (self.axis, self.group, self.block_size), self.momentum or momentum
        ops.observe_minmax_(x.detach(), self.lo, self.hi, momentum, *channels, self.skipped)

    def observe_and_quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec, alone: bool
    ) -> Tensor:
        """Observe or follow x, set scale and zero point from the range, and return x quantized with them, in one op."""
        codes = (spec.qmin, spec.qmax, 1.0 if alone else self.momentum, spec.pow2_scale)
        channels = (self.axis, self.group, self.block_size)
        skipped = None if alone else self.skipped
        float16 = spec.scale_dtype == "float16"
        return ops.observe_fake_quant(
            x, self.lo, self.hi, scale, zero_point, *codes, *channels, skipped, float16=float16
        )


class MovingAverageObserver(RangeObserver):
    """Moving average of the minimum and maximum; option `momentum` is the weight of each new range."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {"momentum": 0.1}

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        check_momentum(cls.options(spec)["momentum"])


def check_momentum(momentum: object) -> None:
    """Raise ValueError for a momentum outside (0, 1]."""
    if not isinstance(momentum, int | float) or not 0 < momentum <= 1:
        raise ValueError(f"QuantSpec: momentum must lie in (0, 1], got {momentum!r}.")
