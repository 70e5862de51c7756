"""Quantizers of tensors, their observers, their frozen form, and switches for all quantizers of a model."""

from qtoolkit.public import publish
from qtoolkit.quantizers.frozen import ShapedActivation
from qtoolkit.quantizers.kinds.apot import Levels
from qtoolkit.quantizers.kinds.dorefa import OddCodes
from qtoolkit.quantizers.kinds.qil import Interval
from qtoolkit.quantizers.observers import (
    ClipStdObserver,
    EndsObserver,
    HistogramObserver,
    LSQStartObserver,
    MovingAverageObserver,
    MovingHistogramObserver,
    Observer,
    Pow2ModeObserver,
    Pow2Observer,
    RangeObserver,
)

__all__ = [
    "ClipStdObserver",
    "EndsObserver",
    "HistogramObserver",
    "Interval",
    "LSQStartObserver",
    "Levels",
    "MovingAverageObserver",
    "MovingHistogramObserver",
    "Observer",
    "OddCodes",
    "Pow2ModeObserver",
    "Pow2Observer",
    "RangeObserver",
    "ShapedActivation",
]
publish(__name__, *(globals()[name] for name in __all__))
