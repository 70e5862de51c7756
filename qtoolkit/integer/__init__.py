"""Ops on integer codes, as runtimes compute them: exact sums, and each runtime's own rounding."""
