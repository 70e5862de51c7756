"""A scale that follows a range."""

from typing import TYPE_CHECKING

from torch import Tensor

from qtoolkit.quantizers import first_steps
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.observers import RangeObserver
from qtoolkit.quantizers.spec_ops import grid_of_range

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


class FixedScale(QuantizerKind):
    """The scale comes from a range: as calibrated, of a weight as it is, or with `observing` as observed."""

    LEARNED = False

    def follows(self, quantizer: "RangedQuantizer") -> bool:
        """Return whether the observer takes the range of one tensor in one read."""
        return isinstance(quantizer.observer, RangeObserver)

    def start(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        return quantizer._scale, None, None

    def observe(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        quantizer.observer(x)
        self.take_observed(quantizer)

    def follow(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        if isinstance(quantizer.observer, RangeObserver):
            quantizer.observer.follow(x)
        self.take_observed(quantizer)

    def average(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        """Take x into the moving average; the scale stays until `take_observed`."""
        if isinstance(quantizer.observer, RangeObserver):
            quantizer.observer.average(x, first_steps.MOMENTUM)

    def observe_and_quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Do both in one op where there is one."""
        fused = self._in_one_op(quantizer, x, alone=False)
        return super().observe_and_quantize(quantizer, x) if fused is None else fused

    def follow_and_quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Do both in one op where there is one."""
        fused = self._in_one_op(quantizer, x, alone=True)
        return super().follow_and_quantize(quantizer, x) if fused is None else fused

    def take_observed(self, quantizer: "RangedQuantizer") -> None:
        quantizer.ready = True
        quantizer.write_grid(*grid_of_range(*quantizer.observer.range(), quantizer.spec))

    def _in_one_op(self, quantizer: "RangedQuantizer", x: Tensor, alone: bool) -> Tensor | None:
        spec, observer = quantizer.spec, quantizer.observer
        if not isinstance(observer, RangeObserver) or spec.format != "int":
            return None
        quantizer.ready = True
        return observer.observe_and_quantize(x, quantizer._scale, quantizer._zero_point, spec, alone)
