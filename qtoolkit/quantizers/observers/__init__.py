"""Observers: they record the range of the tensors that a quantizer sees."""

from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.observers.clip_std import ClipStdObserver
from qtoolkit.quantizers.observers.constant import ConstantRangeObserver
from qtoolkit.quantizers.observers.histogram import HistogramObserver, MovingHistogramObserver
from qtoolkit.quantizers.observers.lsq_start import LSQStartObserver
from qtoolkit.quantizers.observers.minmax import EndsObserver, MovingAverageObserver, RangeObserver
from qtoolkit.quantizers.observers.pow2 import Pow2ModeObserver, Pow2Observer

__all__ = [
    "ClipStdObserver",
    "ConstantRangeObserver",
    "EndsObserver",
    "HistogramObserver",
    "LSQStartObserver",
    "MovingAverageObserver",
    "MovingHistogramObserver",
    "Observer",
    "Pow2ModeObserver",
    "Pow2Observer",
    "RangeObserver",
]
