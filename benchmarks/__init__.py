"""Benchmarks: `pytest benchmarks` prints tables of ratios; the modules of `pages` write what the documentation shows."""
