"""Sizes and types of a file's tensors, and multiplications of its nodes."""

import math
from collections.abc import Iterable

import onnx_ir

from qtoolkit.export.exporters.quiet import without_noise
from qtoolkit.export.files.graph import input_at
from qtoolkit.lint.ops import LayerFacts
from qtoolkit.report.layer_costs import multiplications


def infer_sizes(model: onnx_ir.Model) -> None:
    """Set the types and shapes of a file's tensors as far as ONNX infers them; dynamic sizes count as 1."""
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = onnx_ir.Shape([size if isinstance(size, int) else 1 for size in value.shape])
    for node in model.graph.all_nodes():
        for value in node.outputs:  # what they were for sizes that vary
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    with without_noise():
        onnx_ir.passes.common.ShapeInferencePass()(model)


def type_of(value: onnx_ir.Value | None) -> str:
    """Return ONNX's name of a tensor's type; "" if unknown."""
    return "" if value is None or value.dtype is None else value.dtype.name


def values_of(value: onnx_ir.Value | None) -> int | None:
    """Return the number of values of a tensor; None if unknown."""
    sizes = _sizes(value)
    return None if sizes is None else math.prod(sizes)


def sum_of_values(values: Iterable[onnx_ir.Value]) -> int | None:
    """Return the total number of values of tensors; None if one of them is unknown."""
    found = [values_of(value) for value in values]
    return None if None in found else sum(filter(None, found))


def weights_of(layer: LayerFacts) -> int:
    """Return the number of values of a layer's weight; 0 if its sizes are unknown."""
    return layer.inputs // layer.groups * layer.outputs * math.prod(layer.kernel)


def macs_of(node: onnx_ir.Node, layer: LayerFacts | None) -> int:
    """Return the multiplications of a node; 0 for unknown sizes, and for ops that multiply no matrices."""
    x, y = input_at(node, 0), node.outputs[0] if node.outputs else None
    if layer is not None and (weights := weights_of(layer)) and node.op_type != "Gather":
        transposed = node.op_type == "ConvTranspose"
        values = values_of(x if transposed else y) or 0
        return multiplications(values, weights, layer.inputs if transposed else layer.outputs)
    shapes = [_sizes(value) for value in (*node.inputs, None, None, None)[:3]]
    if node.op_type in ("MatMul", "Gemm") and shapes[0]:
        inner = shapes[0][0 if node.attributes.get_int("transA", 0) else -1]
        return (values_of(y) or 0) * inner
    if node.op_type == "Attention" and shapes[0] and shapes[1]:  # scores, and the sums that they weight
        return 2 * math.prod(shapes[0]) * (shapes[1][-2:][0])
    if node.op_type in ("LSTM", "GRU") and shapes[0] and shapes[1] and shapes[2]:  # steps and batch come first
        return math.prod(shapes[0][:2]) * (math.prod(shapes[1]) + math.prod(shapes[2]))
    return 0


def _sizes(value: onnx_ir.Value | None) -> tuple[int, ...] | None:
    if value is None or value.shape is None:
        return None
    sizes = tuple(size for size in value.shape if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) else None
