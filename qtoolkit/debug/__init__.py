"""Looking into quantized models: which layer is bad, what its quantization costs, and what is quantized where."""

from qtoolkit.debug.compare import Comparison, LayerComparison, Similarity, compare
from qtoolkit.debug.draw import draw
from qtoolkit.debug.sensitivity import Row, Sensitivity, sensitivity

__all__ = ["Comparison", "LayerComparison", "Row", "Sensitivity", "Similarity", "compare", "draw", "sensitivity"]
