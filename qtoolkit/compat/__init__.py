"""Adapters for scripts and checkpoints of other tools."""

from qtoolkit.compat import mqbench, pytorch_quantization
from qtoolkit.compat.checkpoints import load_amax

__all__ = ["load_amax", "mqbench", "pytorch_quantization"]
