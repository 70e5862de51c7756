"""Products of a tensor and a gate of it: SiLU and hard swish."""

from dataclasses import dataclass

import onnx_ir

from qtoolkit.export.files.graph import constant_of
from qtoolkit.export.files.kinds import uses_after

GATED = {"Sigmoid": "silu", "HardSigmoid": "hardswish"}  # x * gate(x)
SUMS = ("Add", "Sum")


@dataclass(frozen=True)
class Gate:
    """The nodes of gate(x) in x * gate(x), used by nothing else, and the kind of the product."""

    x: onnx_ir.Value
    nodes: tuple[onnx_ir.Node, ...]
    kind: str


def gate_of(product: onnx_ir.Node) -> Gate | None:
    """Return the gate of x * gate(x); None for other nodes."""
    if product.op_type != "Mul" or len(product.inputs) != 2:
        return None
    for x, other in (product.inputs, reversed(product.inputs)):
        found = None if x is None else _gate(x, other)
        if found is not None:
            return found
    return None


def _gate(x: onnx_ir.Value, value: onnx_ir.Value | None) -> Gate | None:
    """Return the gate that computes a value from x: an op, or 0.5 * tanh(0.5 * x) + 0.5 for a sigmoid."""
    node = None if value is None else _alone(value)
    if node is not None and node.op_type in GATED and node.inputs[0] is x:
        return Gate(x, (node,), GATED[node.op_type])
    nodes: list[onnx_ir.Node] = []
    for op_type in ("Add", "Mul", "Tanh", "Mul"):
        node = None if value is None else _alone(value)
        if node is None or node.op_type != op_type:
            return None
        nodes.append(node)
        value, *others = sorted((each for each in node.inputs if each is not None), key=_is_constant)
        if not all(map(_is_half, others)):
            return None
    return Gate(x, tuple(nodes), GATED["Sigmoid"]) if value is x else None


def _is_constant(value: onnx_ir.Value) -> bool:
    return constant_of(value) is not None


def _is_half(value: onnx_ir.Value) -> bool:
    constant = constant_of(value)
    return constant is not None and constant.size == 1 and constant.item() == 0.5


def _alone(value: onnx_ir.Value) -> onnx_ir.Node | None:
    """Return the node that computes a value with a single user."""
    return value.producer() if len(value.uses()) == 1 and not value.is_graph_output() else None


def is_faster_by_tanh(product: onnx_ir.Node, gate: Gate) -> bool:
    """Return whether TensorRT 11 computes x * sigmoid(x) faster as x * (0.5 * tanh(0.5 * x) + 0.5), in float16.

    It fuses this form into a preceding convolution, but not a sigmoid and its product. A result that is added to another tensor
    is excluded: TensorRT would fuse the add too, and reads the other tensor wrong if it is part of a concat (NVIDIA/TensorRT
    #4854, up to 11.3).
    """
    return [node.op_type for node in gate.nodes] == ["Sigmoid"] and not _is_added(product.outputs[0])


def _is_added(value: onnx_ir.Value) -> bool:
    """Return whether a value is added to another computed tensor, directly or after data movement."""
    return any(
        user.op_type in SUMS and all(constant_of(each) is None for each in user.inputs) for user, _ in uses_after(value)
    )
