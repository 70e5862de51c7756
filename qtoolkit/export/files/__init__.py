"""ONNX files: saved, opened, and read as ops with their quantizers."""
