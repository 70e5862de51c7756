"""Thin adapters, so that scripts written for other tools run after one changed import."""

from qtoolkit.compat import pytorch_quantization
from qtoolkit.compat.checkpoints import load_amax

__all__ = ["load_amax", "pytorch_quantization"]
