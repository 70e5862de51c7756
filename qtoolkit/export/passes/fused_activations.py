"""Rewrite activations so that a target fuses them with the preceding layer."""

import numpy as np
import onnx_ir

from qtoolkit.export.files.gates import gate_of, is_faster_by_tanh
from qtoolkit.export.files.graph import Constants, replace_node


def write_tanh_silu(model: onnx_ir.Model) -> None:
    """Write x * sigmoid(x) as x * (0.5 * tanh(0.5 * x) + 0.5) if that is faster."""
    constants = Constants(model.graph)
    for node in list(model.graph):
        gate = gate_of(node)
        if gate is None or not is_faster_by_tanh(node, gate):
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
