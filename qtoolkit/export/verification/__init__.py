"""Verification: compare the quantized values of runtimes with the model."""
