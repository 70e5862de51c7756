"""Analysis of quantized models: per-layer errors, sensitivity, graph drawing, an HTML report, and statistics of training."""

from qtoolkit.debug.activity import Activity, Hook
from qtoolkit.debug.compare import compare
from qtoolkit.debug.draw import draw
from qtoolkit.debug.report import report
from qtoolkit.debug.sensitivity import Row, Sensitivity, sensitivity
from qtoolkit.debug.similarity import Comparison, LayerComparison, Similarity
from qtoolkit.debug.watch import Watch, watch
from qtoolkit.public import publish

__all__ = [
    "Activity", "Comparison", "LayerComparison", "Row", "Sensitivity", "Similarity", "Watch", "compare", "draw",
    "report", "sensitivity", "watch",
]  # fmt: skip
publish(__name__, Hook)
