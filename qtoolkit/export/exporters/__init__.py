"""torch's two ONNX exporters, and what they record of a quantizing op."""
