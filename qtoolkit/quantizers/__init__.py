"""Quantizers: the module that quantizes a tensor, its observers, its frozen form, and switches over a model."""

from qtoolkit.public import publish
from qtoolkit.quantizers.observers import HistogramObserver, Observer, RangeObserver

__all__ = ["HistogramObserver", "Observer", "RangeObserver"]
publish(__name__, HistogramObserver, Observer, RangeObserver)
