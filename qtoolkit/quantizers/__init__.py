"""Quantizers of tensors, their observers, their frozen form, and switches for all quantizers of a model."""

from qtoolkit.public import publish
from qtoolkit.quantizers.observers import (
    HistogramObserver,
    LSQStartObserver,
    MovingAverageObserver,
    Observer,
    RangeObserver,
)

__all__ = ["HistogramObserver", "LSQStartObserver", "MovingAverageObserver", "Observer", "RangeObserver"]
publish(__name__, HistogramObserver, LSQStartObserver, MovingAverageObserver, Observer, RangeObserver)
