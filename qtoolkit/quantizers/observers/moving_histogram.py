"""The moving average of the ranges that a method chooses for each input."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.ops.observe import RangeMethod
from qtoolkit.quantizers.observers.histogram import HistogramObserver, check_histogram, histogram_of, searched_codes
from qtoolkit.quantizers.observers.minmax import EndsObserver, check_momentum


class MovingHistogramObserver(EndsObserver):
    """Moving average of the range that a method chooses from the histogram of each input, at most the input's own range.

    The first input gives the first range. Each input is searched, which waits for a GPU; see `HistogramObserver` for the
    range of all inputs. Processes have the mean of their averages.

    Args:
        momentum: Weight of each new range.
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
        >>> observer = MovingHistogramObserver(momentum=0.5, method="percentile", percentile=100)
        >>> observer(torch.tensor([0.0, 4.0]))
        >>> observer(torch.tensor([0.0, 8.0]))
        >>> observer.range()
        (tensor(0.), tensor(6.))
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"momentum": 0.1, **HistogramObserver.OPTIONS}

    def __init__(
        self,
        momentum: float = OPTIONS["momentum"],
        qmin: int = -128,
        qmax: int = 127,
        symmetric: bool = True,
        bins: int = OPTIONS["bins"],
        method: RangeMethod = OPTIONS["method"],
        percentile: float = OPTIONS["percentile"],
        shape: tuple[int, ...] = (),
        axis: int | None = None,
        group: int = 1,
    ) -> None:
        super().__init__(shape, axis, group, momentum=momentum)
        self.qmin, self.qmax, self.symmetric = qmin, qmax, symmetric
        self.bins, self.method, self.percentile = bins, method, percentile

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        """Raise ValueError as `HistogramObserver` does, and for a momentum outside (0, 1]."""
        check_momentum(cls.options(spec)["momentum"])
        check_histogram(spec, cls.options(spec))

    @classmethod
    def from_spec(cls, spec: QuantSpec, shape: tuple[int, ...], group: int) -> Self:
        """Build the observer of a spec, with ranges of this shape."""
        options = cls.options(spec)
        grid = (options.pop("momentum"), *searched_codes(spec), spec.symmetric)
        return cls(*grid, shape=shape, axis=spec.axis, group=group, **options)

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
        """Return the method, the number of bins and the momentum."""
        return f"method={self.method!r}, bins={self.bins}, momentum={self.momentum}"
