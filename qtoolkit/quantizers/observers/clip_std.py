"""The observer of mean and standard deviation."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers.minmax import EndsObserver
from qtoolkit.quantizers.spec_ops import rows_of


class ClipStdObserver(EndsObserver):
    """The range from mean - deviations * std to mean + deviations * std of all inputs, at most the observed range.

    Values further out are clipped. `std` is the population's standard deviation. Batches and processes add up as by Chan,
    Golub and LeVeque (1979), in float64. The sums for the mean are not part of the state dict; after loading one, the range is
    of all inputs.

    Example:
        >>> observer = ClipStdObserver(qt.QuantSpec(observer="clip_std", observer_args={"deviations": 2}))
        >>> observer(torch.tensor([0.0] * 96 + [10.0] * 4))
        >>> observer.range()
        (tensor(0.), tensor(4.3192))
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"deviations": 2.6}
    ADDED_UP = ("moments",)

    moments: Tensor  # count, mean, and sum of squared differences from it

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        self.deviations: float = self.options(spec)["deviations"]
        self.moments = torch.zeros(3, *shape, dtype=torch.float64)

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        deviations = cls.options(spec)["deviations"]
        if not isinstance(deviations, int | float) or not 0 < deviations < float("inf"):
            raise ValueError(f"QuantSpec: deviations must be a positive number, got {deviations!r}.")

    def forward(self, x: Tensor) -> None:
        """Observe x, where it is finite."""
        super().forward(x)
        self.put_sums_on(x.device)
        x = x.detach()
        if x.numel() == 0:
            return
        rows = rows_of(x, self.lo.numel(), self.axis, self.group, self.block_size).double()  # squares leave float32
        variance, mean = (each.reshape(self.lo.shape) for each in torch.var_mean(rows, 1, correction=0))
        count = torch.full_like(mean, rows.size(1))
        seen = mean.isfinite() & variance.isfinite()
        new = torch.where(seen, torch.stack((count, mean, variance * count)), 0)
        self.moments.copy_(_sum_of(self.moments, new))

    def range(self) -> tuple[Tensor, Tensor]:
        count, mean, squares = self.moments
        reach = self.deviations * (squares / count).sqrt()
        known = count > 0
        lo = torch.where(known, (mean - reach).to(self.lo.dtype), self.lo)
        hi = torch.where(known, (mean + reach).to(self.hi.dtype), self.hi)
        return lo.maximum(self.lo), hi.minimum(self.hi)

    def resize(self, shape: tuple[int, ...]) -> None:
        super().resize(shape)
        self.moments = self.moments.new_zeros(3, *shape)

    def sum_of(self, sums: Sequence[Tensor]) -> Tensor:
        return reduce(_sum_of, sums)

    def extra_repr(self) -> str:
        return f"deviations={self.deviations}"


def _sum_of(one: Tensor, other: Tensor) -> Tensor:
    """Return the moments of the values of both."""
    (n, mean, squares), (m, other_mean, other_squares) = one, other
    total = n + m
    share = torch.where(total > 0, m / total, 0)
    step = other_mean - mean
    return torch.stack((total, mean + step * share, squares + other_squares + step * step * n * share))
