"""Quantizers: the module that quantizes a tensor, its observers, its frozen form, and switches over a model."""
