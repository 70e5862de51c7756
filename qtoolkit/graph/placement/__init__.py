"""Decide which tensors are quantized. Nothing here changes a graph."""
