"""The range from which a learned scale starts."""

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers.minmax import EndsObserver
from qtoolkit.quantizers.spec_ops import lsq_start, rows_of


class LSQStartObserver(EndsObserver):
    """The range of the start of LSQ (arXiv 1902.08153, section 2.1): scale = 2 * mean|x| / sqrt(qmax).

    It is the range of all inputs, multiplied by a factor so that the scale is the paper's; the zero point belongs to the
    whole range. It never exceeds the observed range: with many bits, the paper's scale would leave integers unused. Sums
    for the mean are not part of the state dict; after loading one, the range is of all inputs.

    Example:
        >>> observer = LSQStartObserver(qt.QuantSpec(bits=2, observer="lsq"))
        >>> observer(torch.tensor([-1.0, -1.0, 1.0, 9.0]))
        >>> observer.range()
        (tensor(-0.6667), tensor(6.))
    """

    ADDED_UP = ("total", "count")

    total: Tensor
    count: Tensor

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        self.qmin, self.qmax, self.symmetric = spec.qmin, spec.qmax, spec.symmetric
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.count = torch.zeros(shape, dtype=torch.int64)

    def forward(self, x: Tensor) -> None:
        super().forward(x)
        self.put_sums_on(x.device)
        rows = rows_of(x.detach().abs(), self.lo.numel(), self.axis, self.group, self.block_size)
        sums = rows.sum(1, dtype=torch.float64).reshape(self.total.shape)
        self.total += torch.where(sums.isfinite(), sums, 0)
        self.count += sums.isfinite() * rows.size(1)

    def range(self) -> tuple[Tensor, Tensor]:
        whole = ops.grid_of_range(self.lo, self.hi, self.qmin, self.qmax, self.symmetric)[0]
        start = lsq_start(self.total / self.count, self.qmax).to(self.lo.dtype)
        known = (self.count > 0) & whole.isfinite()  # the scale of a range beyond float32 is not
        factor = torch.where(known, start / whole, 1).clamp(max=1).to(self.lo.dtype)
        return self.lo * factor, self.hi * factor

    def resize(self, shape: tuple[int, ...]) -> None:
        super().resize(shape)
        self.total, self.count = self.total.new_zeros(shape), self.count.new_zeros(shape)
