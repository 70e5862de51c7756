"""Quantization without a graph: layers replaced one by one, chains named by the user."""
