"""Observers: they record the range of the tensors that a quantizer sees."""

from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.observers.histogram import HistogramObserver
from qtoolkit.quantizers.observers.lsq_start import LSQStartObserver
from qtoolkit.quantizers.observers.minmax import MovingAverageObserver, RangeObserver

__all__ = ["HistogramObserver", "LSQStartObserver", "MovingAverageObserver", "Observer", "RangeObserver"]
