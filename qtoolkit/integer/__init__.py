"""Integer arithmetic of runtimes: exact sums, and the rounding of each runtime."""
