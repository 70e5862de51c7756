"""The quantizers: one small class each."""
