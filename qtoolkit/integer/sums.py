"""The module path under which pickles of integer models store the bounds of their sums."""

from qtoolkit.ops.sums import Bounds

__all__ = ["Bounds"]
