"""Q/DQ pairs behind ops that move int8 values, which onnxruntime would otherwise insert itself, and wrongly."""

from typing import TYPE_CHECKING, Any

import numpy as np

from qtoolkit.errors import present
from qtoolkit.export.files.graph import Constants, constant_input, has_one_scale, maker_of
from qtoolkit.integer.onnxruntime import PAIRS_MOVE_PAST

if TYPE_CHECKING:
    import onnx_ir

OPSET = 21  # the first in which it does so


def quantize_moved_codes(model: "onnx_ir.Model", opset: int) -> None:
    """Insert a pair with the same scale behind each op that moves the values of an int8 DequantizeLinear with one scale.

    No value changes: the moved values are on the grid. onnxruntime's default optimizations insert these pairs, to run the op
    on codes. Its own have the attribute `output_dtype` from opset 21 on, which it leaves at INT8 when it then makes the codes
    UINT8: the model does not load ("output_dtype INT8 does not match y_zero_point type UINT8", onnxruntime 1.26 to 1.30).
    """
    waiting = [node for node in model.graph if node.op_type == "DequantizeLinear"] if opset >= OPSET else []
    while waiting:
        dequantize = waiting.pop()
        if not _is_int8_with_one_scale(dequantize) or dequantize.outputs[0].is_graph_output():
            continue
        for mover, index in tuple(dequantize.outputs[0].uses()):
            if mover.op_type in PAIRS_MOVE_PAST and not mover.domain and index == 0:
                waiting += _insert_behind(mover, dequantize)


def _is_int8_with_one_scale(dequantize: "onnx_ir.Node") -> bool:
    zero_point = constant_input(dequantize, 2)
    return has_one_scale(dequantize) and zero_point is not None and zero_point.dtype == np.int8


def _insert_behind(mover: "onnx_ir.Node", dequantize: "onnx_ir.Node") -> "list[onnx_ir.Node]":
    """Insert a QuantizeLinear behind a node, and a DequantizeLinear for each use; return the latter."""
    import onnx_ir

    moved, graph = mover.outputs[0], present(mover.graph, f"the graph of {mover.name!r}")
    users = [use for use in moved.uses() if use[0].op_type != "QuantizeLinear"]
    if moved.is_graph_output() and moved.uses():
        return []
    scale, zero_point = dequantize.inputs[1:]
    quantize = onnx_ir.node("QuantizeLinear", [moved, scale, zero_point], name=f"{mover.name}/quantize")
    quantize.outputs[0].name = f"{moved.name}/codes"
    pairs = []
    for number in range(max(len(users), int(moved.is_graph_output()))):
        inputs = [quantize.outputs[0], scale, zero_point]
        pairs.append(onnx_ir.node("DequantizeLinear", inputs, name=f"{mover.name}/dequantize"))
        pairs[-1].outputs[0].name = f"{moved.name}/values{number or ''}"
    if moved.is_graph_output():
        _hand_over_output(moved, pairs[0].outputs[0], graph)
    for (user, index), pair in zip(users, pairs, strict=False):
        user.replace_input_with(index, pair.outputs[0])
    if pairs:
        graph.insert_after(mover, [quantize, *pairs])
    return pairs


def _hand_over_output(moved: "onnx_ir.Value", values: "onnx_ir.Value", graph: "onnx_ir.Graph") -> None:
    """Make a graph return other values under the name of those that it returned."""
    values.name, moved.name = moved.name, f"{moved.name}/moved"
    values.shape, values.type = moved.shape, moved.type
    graph.outputs[graph.outputs.index(moved)] = values


def keep_products_of_codes(model: "onnx_ir.Model", opset: int) -> None:
    """Give the bias behind a product of int8 values the rank of its output, where that is above 2.

    Otherwise onnxruntime makes product and bias one Gemm of a matrix, with a Reshape in front of it, behind which it inserts
    the pair that `quantize_moved_codes` describes.
    """
    import onnx_ir

    products = [node for node in model.graph if opset >= OPSET and _is_product_of_codes(node)]
    if any(node.outputs[0].shape is None for node in products):
        onnx_ir.passes.common.ShapeInferencePass()(model)
    for node in products:
        rank = len(node.outputs[0].shape or ())
        for user, index in node.outputs[0].uses():
            if user.op_type != "Add" or rank <= 2:
                continue
            holder, place = user, 1 - index
            source = maker_of(user.inputs[place], "DequantizeLinear")
            if source is not None and len(source.outputs[0].uses()) == 1:
                holder, place = source, 0  # the codes of the bias
            bias = constant_input(holder, place)
            if bias is not None and bias.ndim == 1:
                _replace_constant(holder, place, bias.reshape([1] * (rank - 1) + [-1]), model)
                if holder is not user:
                    holder.attributes["axis"] = onnx_ir.AttrInt64("axis", rank - 1)
                    holder.outputs[0].shape = None


def _is_product_of_codes(node: "onnx_ir.Node") -> bool:
    source = maker_of(node.inputs[0], "DequantizeLinear") if node.op_type == "MatMul" else None
    return source is not None and _is_int8_with_one_scale(source)


def _replace_constant(node: "onnx_ir.Node", index: int, array: "np.ndarray[Any, Any]", model: "onnx_ir.Model") -> None:
    import onnx_ir

    old = present(node.inputs[index], f"input {index} of {node.name!r}")
    dtype = onnx_ir.DataType.from_numpy(array.dtype)
    node.replace_input_with(index, Constants(model.graph).add(array, dtype, f"{old.name}.of_{node.name}"))
