"""Helpers for graphs of onnx_ir: producers, constants, and new nodes and constants."""

from collections.abc import Hashable, Sequence
from itertools import chain, count

import numpy as np
import onnx_ir

from qtoolkit.runtimes.execution import Array


def maker_of(value: onnx_ir.Value | None, op_type: str) -> onnx_ir.Node | None:
    """Return the node that computes a value, if it is of this op."""
    maker = None if value is None else value.producer()
    return maker if maker is not None and maker.op_type == op_type else None


def input_at(node: onnx_ir.Node, index: int) -> onnx_ir.Value | None:
    """Return an input of a node; None if it is missing or omitted."""
    return node.inputs[index] if len(node.inputs) > index else None


def constant_of(value: onnx_ir.Value | None) -> Array | None:
    """Return the array of a value; None if it is computed."""
    tensor = None if value is None else onnx_ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_input(node: onnx_ir.Node, index: int) -> Array | None:
    """Return the array of a node's input; None if it is missing or computed."""
    return constant_of(input_at(node, index))


def has_one_scale(pair: onnx_ir.Node) -> bool:
    """Return whether a QuantizeLinear or DequantizeLinear has one constant scale."""
    scale = constant_input(pair, 1)
    return scale is not None and scale.size == 1


def is_of_one(node: onnx_ir.Node) -> bool:
    """Return whether a node is a Max of one tensor, an identity op (`qtoolkit.export.passes.onnxruntime`)."""
    return node.op_type == "Max" and len(node.inputs) == 1


def replace_node(node: onnx_ir.Node, new: Sequence[onnx_ir.Node], value: onnx_ir.Value) -> None:
    """Replace a node by new nodes, and its output by one of their values."""
    if node.graph is not None:
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, node.outputs, [value])


def unused_name(graph: onnx_ir.Graph, name: str) -> str:
    """Return this name, with a number appended if a constant, an input or an output of the graph already has it."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    return next(unique for unique in names if unique not in graph.initializers and unique not in ends)


class Constants:
    """The constants that are added to a graph; equal `shared` constants are added once."""

    def __init__(self, graph: onnx_ir.Graph) -> None:
        self.graph = graph
        self.known: dict[Hashable, onnx_ir.Value] = {}

    def shared(self, array: Array, dtype: onnx_ir.DataType, name: str) -> onnx_ir.Value:
        """Return a small constant; a new one gets this name."""
        key = (dtype, array.shape, array.tobytes())
        if key not in self.known:
            self.known[key] = self.add(array, dtype, name)
        return self.known[key]

    def add(self, array: Array, dtype: onnx_ir.DataType, name: str) -> onnx_ir.Value:
        """Return a new constant, named like this."""
        unique = unused_name(self.graph, name)
        tensor = onnx_ir.Tensor(array.astype(dtype.numpy()), dtype, name=unique)
        value = onnx_ir.val(unique, dtype, array.shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def integers(self, values: Sequence[int | onnx_ir.SymbolicDim], name: str) -> onnx_ir.Value:
        """Return a new constant of int64, such as a shape or axes."""
        return self.add(np.array(values, np.int64), onnx_ir.DataType.INT64, name)
