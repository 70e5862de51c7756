"""Which targets have a runtime's rules, and where the rules are documented."""

from qtoolkit.backends import Backend

TENSORRT_DOCS = "TensorRT documentation, Working with Quantized Types"
IMPORTER = "onnx-tensorrt, the importer of QuantizeLinear and DequantizeLinear"
MODEL_OPTIMIZER = "NVIDIA Model Optimizer, modelopt.onnx.quantization"
SELECTORS = "onnxruntime qdq_selectors.cc; measured with 1.30, docs/runtimes.md"
OPENVINO_LPT = "OpenVINO CPU plugin, low precision transformations"
ONNX = "ONNX, the operators QuantizeLinear and DequantizeLinear"
TABLE = "qtoolkit/backends.py, with the sources of each target"


def on_tensorrt(backend: Backend) -> bool:
    """Return whether a target has TensorRT's integer arithmetic."""
    return backend.runtime == "tensorrt"


def on_onnxruntime(backend: Backend) -> bool:
    """Return whether a target has onnxruntime's integer arithmetic."""
    return backend.runtime == "onnxruntime"


def on_openvino(backend: Backend) -> bool:
    """Return whether a target has OpenVINO's integer arithmetic."""
    return backend.runtime == "openvino"
