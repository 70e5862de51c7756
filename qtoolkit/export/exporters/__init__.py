"""torch's two ONNX exporters, and their translations of quantizing ops."""
