"""Where rules are documented that are not a runtime's own (`qtoolkit.runtimes.table.Runtime.rules`)."""

IMPORTER = "onnx-tensorrt, the importer of QuantizeLinear and DequantizeLinear"
MODEL_OPTIMIZER = "NVIDIA Model Optimizer, modelopt.onnx.quantization"
ONNX = "ONNX, the operators QuantizeLinear and DequantizeLinear"
TABLE = "qtoolkit/backends.py, with the sources of each target"
