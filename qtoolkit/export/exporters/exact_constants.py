"""Optimize an exported graph without losing constants that are close to 0 or 1.

The rules of onnxscript remove x + c and x * c where c is 0 or 1 within a tolerance (1e-8, or 1e-5 of 1): without the eps of
x / (x.norm() + 1e-9), zeros give NaN.
"""

import math
from collections.abc import Iterator

import onnx_ir
import torch
from onnxscript import optimizer


def optimize(program: torch.onnx.ONNXProgram) -> None:
    """Optimize the graph of a program in place."""
    graph = program.model.graph
    if not any(_is_close(value) for value in _constants(graph)):
        program.optimize()
        return
    optimizer.fold_constants(program.model)  # their Casts: the rules look at constants alone
    kept = {value: _input_for(graph, value) for value in list(_constants(graph)) if _is_close(value)}
    program.optimize()
    for value, hidden in kept.items():
        graph.inputs.remove(hidden)
        hidden.const_value = onnx_ir.convenience.get_const_tensor(value)
        graph.register_initializer(hidden)


def _constants(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    yield from graph.initializers.values()
    yield from (node.outputs[0] for node in graph if node.op_type == "Constant")


def _is_close(value: onnx_ir.Value) -> bool:
    """Return whether a value is a scalar that onnxscript's rules take for 0 or 1, and is neither."""
    tensor = onnx_ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.shape.rank() or not tensor.dtype.is_floating_point():
        return False
    number = float(tensor.numpy())
    taken = {neutral for neutral in (0.0, 1.0) if math.isclose(number, neutral, rel_tol=1e-5, abs_tol=1e-8)}
    return bool(taken) and number not in taken


def _input_for(graph: onnx_ir.Graph, value: onnx_ir.Value) -> onnx_ir.Value:
    """Put an input of the graph in place of a constant; return it."""
    hidden = onnx_ir.Value(name=f"{value.name}.exact", shape=value.shape, type=value.type)
    graph.inputs.append(hidden)
    onnx_ir.convenience.replace_all_uses_with(value, hidden, replace_graph_outputs=True)
    return hidden
