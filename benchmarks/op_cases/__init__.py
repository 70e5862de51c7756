"""What benchmarks/pages/ops.py measures: one file a subject."""
