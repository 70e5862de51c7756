"""Analysis of quantized models: error of each layer, sensitivity of the score to each layer, drawing of the graph."""

from qtoolkit.debug.compare import Comparison, LayerComparison, Similarity, compare
from qtoolkit.debug.draw import draw
from qtoolkit.debug.sensitivity import Row, Sensitivity, sensitivity

__all__ = ["Comparison", "LayerComparison", "Row", "Sensitivity", "Similarity", "compare", "draw", "sensitivity"]
