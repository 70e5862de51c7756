"""Quantizers of tensors, their observers, their frozen form, and switches for all quantizers of a model."""
