"""Activations in the forms that a target computes as one op with the layer before them."""

import numpy as np
import onnx_ir

from qtoolkit.export.files.graph import Constants, constant_of, replace_node
from qtoolkit.export.files.ops import gate_of
from qtoolkit.export.passes.repeated_pairs import moved_inputs
from qtoolkit.op_kinds.reached import reached

SUMS = ("Add", "Sum")


def write_tanh_silu(model: onnx_ir.Model) -> None:
    """Write each x * sigmoid(x) as x * (0.5 * tanh(0.5 * x) + 0.5), but for one whose result is added to another tensor.

    TensorRT 11 computes this form in one op with a convolution before it in float16, and a sigmoid with its product in ops of
    their own. Together with a residual add behind it, the op reads the other tensor wrong where that lies in a concat
    (NVIDIA/TensorRT #4854, up to 11.3).
    """
    constants = Constants(model.graph)
    for node in list(model.graph):
        gate = gate_of(node)
        if gate is None or gate.kind != "silu" or len(gate.nodes) > 1 or _is_added(node.outputs[0]):
            continue
        half = constants.shared(np.array(0.5), gate.x.dtype or onnx_ir.DataType.FLOAT, "half")
        name = node.name or node.outputs[0].name
        scaled = onnx_ir.node("Mul", [gate.x, half], name=f"{name}.scaled")
        tanh = onnx_ir.node("Tanh", scaled.outputs, name=f"{name}.tanh")
        halved = onnx_ir.node("Mul", [tanh.outputs[0], half], name=f"{name}.halved")
        shifted = onnx_ir.node("Add", [halved.outputs[0], half], name=f"{name}.gate")
        product = onnx_ir.node("Mul", [gate.x, shifted.outputs[0]], name=name)
        for each in (scaled, tanh, halved, shifted, product):
            each.outputs[0].type, each.outputs[0].shape = gate.x.type, gate.x.shape
        replace_node(node, [scaled, tanh, halved, shifted, product], product.outputs[0])
        model.graph.remove(gate.nodes, safe=True)


def _is_added(value: onnx_ir.Value) -> bool:
    """Return whether a sum with another computed tensor takes a value, as it is or moved."""
    return any(
        user.op_type in SUMS and all(constant_of(each) is None for each in user.inputs)
        for each in reached([value], _moved_to)
        for user, _ in each.uses()
    )


def _moved_to(value: onnx_ir.Value) -> list[onnx_ir.Value]:
    return [output for user, _ in value.uses() if value in moved_inputs(user) for output in user.outputs]
