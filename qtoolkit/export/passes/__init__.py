"""Passes on a finished file: each changes the ONNX graph, none changes a quantized value."""
