"""Verification: the codes that runtimes compute, beside those of the model."""
