"""Looking into quantized models: which layer is bad, and what is quantized where."""

from qtoolkit.debug.compare import Comparison, LayerComparison, Similarity, compare
from qtoolkit.debug.draw import draw

__all__ = ["Comparison", "LayerComparison", "Similarity", "compare", "draw"]
