"""Quantizers of tensors, their observers, their frozen form, and switches for all quantizers of a model."""

from qtoolkit.public import publish
from qtoolkit.quantizers.frozen import ShapedActivation
from qtoolkit.quantizers.kinds.apot import Levels
from qtoolkit.quantizers.kinds.dorefa import OddCodes
from qtoolkit.quantizers.kinds.qil import Interval
from qtoolkit.quantizers.observers import (
    HistogramObserver,
    LSQStartObserver,
    MovingAverageObserver,
    Observer,
    RangeObserver,
)

__all__ = [
    "HistogramObserver",
    "Interval",
    "LSQStartObserver",
    "Levels",
    "MovingAverageObserver",
    "Observer",
    "OddCodes",
    "RangeObserver",
    "ShapedActivation",
]
publish(__name__, HistogramObserver, LSQStartObserver, MovingAverageObserver, Observer, RangeObserver)
publish(__name__, Interval, Levels, OddCodes, ShapedActivation)
