"""Deployment targets, as data: what each quantizes, and where.

Each kind of op (`qtoolkit.graph.kinds`) has a role on a target:

- "compute": its inputs are quantized; its output is left free until a quantized op takes it.
- "merge": its inputs are quantized too, by the target's rule for residual adds.
- "transparent": it moves or picks values without changing them, so the quantizer of its input serves its output.
- "float": left alone, and reported. Every kind that a target does not name is "float".

A new target is one more table here, and a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qtoolkit.config import QConfig, QuantSpec

Role = Literal["compute", "merge", "transparent", "float"]


@dataclass(frozen=True)
class Backend:
    """One deployment target. Change a policy with `dataclasses.replace`.

    Attributes:
        name: What reports call it.
        qconfig: Default config. A weight's axis 0 stands for the output channel of every layer kind.
        roles: Role of each kind of op.
        conv_transpose_axis: Axis of a transposed convolution's weight that the target takes scales along.
        residual_add: Inputs of an add that are quantized: "both", or "identity": all but the branch that ends in a
            convolution, so that the target can fuse the add into it.
        batch_norm: How a layer takes over the batch norm behind it in training: one of `qtoolkit.nn.batch_norm.STRATEGIES`.
        integer_weights: Export weights as integers (DequantizeLinear alone), not as floats with both nodes.
    """

    name: str
    qconfig: QConfig
    roles: Mapping[str, Role]
    conv_transpose_axis: int = 1
    residual_add: Literal["both", "identity"] = "both"
    batch_norm: str = "unscale"
    integer_weights: bool = True


_CONVNET_ROLES: Mapping[str, Role] = {
    "conv": "compute",
    "conv_transpose": "compute",
    "linear": "compute",
    "attention": "compute",
    "avg_pool": "compute",
    "add": "merge",
    "max_pool": "transparent",
    "flatten": "transparent",
    "identity": "transparent",
    "slice": "transparent",
    "zero_pad": "transparent",
}

_SIGNED = QuantSpec(bits=8)
_PER_CHANNEL = QuantSpec(bits=8, axis=0)

# TensorRT 10, explicit quantization. Source: NVIDIA's documentation, "Working with Quantized Types": symmetric int8 in
# [-128, 127], activations per tensor, weights per output channel, Q/DQ on the inputs of weighted ops; of a residual add
# only the identity branch, so that convolution and add fuse; max pooling commutes with quantization, average pooling does
# not. Weights stay float with both nodes, the form that all its parsers read. Transposed convolutions: axis 1 from
# version 10 on.
TENSORRT = Backend(
    name="tensorrt",
    qconfig=QConfig(activation=_SIGNED, weight=_PER_CHANNEL),
    roles=_CONVNET_ROLES,
    residual_add="identity",
    integer_weights=False,
)

# onnxruntime, QDQ format, CPU. Source: its documentation, "Quantize ONNX models": activations uint8 with a zero point,
# weights int8 symmetric per channel (U8S8); its integer kernels take an add whose inputs both are quantized.
ONNXRUNTIME = Backend(
    name="onnxruntime",
    qconfig=QConfig(activation=QuantSpec(bits=8, signed=False, symmetric=False), weight=_PER_CHANNEL),
    roles={**_CONVNET_ROLES, "embedding": "compute"},
)

backends: Mapping[str, Backend] = {b.name: b for b in (TENSORRT, ONNXRUNTIME)}
