"""Learned rounding of weights: units of a graph, their samples, and the learning."""
