"""Quantized weights over training steps: their grids, and how often they change direction."""
