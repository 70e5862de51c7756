"""Which targets have a runtime's rules."""

from qtoolkit.backends import Backend


def on_tensorrt(backend: Backend) -> bool:
    """Return whether a target has TensorRT's integer arithmetic."""
    return backend.runtime == "tensorrt"


def on_onnxruntime(backend: Backend) -> bool:
    """Return whether a target has onnxruntime's integer arithmetic."""
    return backend.runtime == "onnxruntime"


def on_openvino(backend: Backend) -> bool:
    """Return whether a target has OpenVINO's integer arithmetic."""
    return backend.runtime == "openvino"
