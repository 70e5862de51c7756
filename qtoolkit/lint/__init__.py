"""The rules of targets on where quantizers stand, checked on graphs of models and on files alike."""

from qtoolkit.lint.findings import Finding

__all__ = ["Finding"]
