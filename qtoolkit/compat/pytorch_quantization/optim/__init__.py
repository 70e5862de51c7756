"""pytorch_quantization.optim."""

from qtoolkit.compat.pytorch_quantization.optim import helper

__all__ = ["helper"]
