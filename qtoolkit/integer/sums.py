"""The module by which pickles of integer models name the bounds of their sums."""

from qtoolkit.ops.sums import Bounds

__all__ = ["Bounds"]
