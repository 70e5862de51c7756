"""The rules of targets on where quantizers stand, checked on graphs of models and on files alike."""

from qtoolkit.graph.placement.findings import Finding

__all__ = ["Finding"]
