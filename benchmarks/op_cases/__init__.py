"""What benchmarks/ops.py measures: one file a subject."""
