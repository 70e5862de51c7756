"""Mixed precision: choose the bits of each layer so that a model meets a budget with the smallest error."""

from qtoolkit.tuning.mixed_precision.assignment import Assignment, Front
from qtoolkit.tuning.mixed_precision.costs import Layer
from qtoolkit.tuning.mixed_precision.hessian import Trace, hessian_traces
from qtoolkit.tuning.mixed_precision.search import MixedPrecision

__all__ = ["Assignment", "Front", "Layer", "MixedPrecision", "Trace", "hessian_traces"]
