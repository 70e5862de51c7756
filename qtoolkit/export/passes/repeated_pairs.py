"""Q/DQ pairs after data movement ops: pairs that let a runtime execute the op in integers, and pairs that it would insert."""

from collections.abc import Collection, Hashable, Sequence

import numpy as np
import onnx_ir

from qtoolkit.errors import present
from qtoolkit.export.files.graph import Constants, constant_input, constant_of, has_one_scale, maker_of
from qtoolkit.export.files.kinds import moved_from, moved_inputs, uses_after
from qtoolkit.integer.onnxruntime import PAIRS_MOVE_PAST
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.table import OF_ONNX
from qtoolkit.runtimes.execution import Array

Pair = tuple[onnx_ir.Value, onnx_ir.Value]  # a scale and a zero point
OPSET = 21  # the first in which onnxruntime inserts pairs with `output_dtype`


def repeat_pairs(model: onnx_ir.Model, ops: Collection[str]) -> None:
    """Repeat the pair of a tensor after ops of these types. No value changes: the values are already on the pair's grid.

    onnxruntime fuses a concat, a resize or a split only between pairs, and a layer only directly after a DequantizeLinear.
    """
    for node in list(model.graph):
        pair = _pair_of(moved_inputs(node)) if node.op_type in ops else None
        if pair is None:
            continue
        for output in _moved_outputs(node):
            users = list(output.uses())
            if any(user.op_type != "QuantizeLinear" for user, _ in users):
                last = _insert_pair(model, node, output, pair)
                for user, index in users:
                    user.replace_input_with(index, last)


def is_on_codes(value: onnx_ir.Value) -> bool:
    """Return whether a tensor has dequantized values: the output of a DequantizeLinear, directly or after data movement."""
    return all(maker_of(each, "DequantizeLinear") or moved_from(each) for each in reached([value], moved_from))


def separate(model: onnx_ir.Model, first: onnx_ir.Node, second: onnx_ir.Node) -> None:
    """Repeat the pair after a data movement op if another such op uses its output, so that the ops stay separate."""
    output = first.outputs[0]
    pair = _pair_of([each for each in reached([output], moved_from) if maker_of(each, "DequantizeLinear")])
    if pair is not None:
        last = _insert_pair(model, first, output, pair)
        second.replace_input_with(list(second.inputs).index(output), last)


def _moved_outputs(node: onnx_ir.Node) -> Sequence[onnx_ir.Value]:
    return node.outputs if node.op_type == "Split" else node.outputs[:1]  # a max pool's others are positions


def _insert_pair(model: onnx_ir.Model, node: onnx_ir.Node, output: onnx_ir.Value, pair: Pair) -> onnx_ir.Value:
    quantize = onnx_ir.node("QuantizeLinear", [output, *pair], name=f"{output.name}_quantize")
    mixed = output.dtype is not None and pair[0].dtype not in (None, output.dtype)  # a model in half precision
    attributes = {"output_dtype": int(output.dtype)} if mixed and output.dtype is not None else {}
    source = None if node.inputs[0] is None else node.inputs[0].producer()
    if source is not None and "output_dtype" in source.attributes:  # the TorchScript exporter writes few types
        attributes = {"output_dtype": source.attributes.get_int("output_dtype", 0)}
    inputs = [quantize.outputs[0], *pair]
    dequantize = onnx_ir.node("DequantizeLinear", inputs, attributes, name=f"{output.name}_dequantize")
    for new, like in ((quantize, pair[1]), (dequantize, output)):
        new.outputs[0].shape, new.outputs[0].type = output.shape, like.type
    model.graph.insert_after(node, [quantize, dequantize])
    return dequantize.outputs[0]


def _pair_of(values: Sequence[onnx_ir.Value | None]) -> Pair | None:
    """Return the common scale and zero point of these tensors; None if they do not come from pairs with equal ones."""
    pairs = [_constants_of_pair(value) for value in values]
    first = pairs[0] if pairs else None
    if first is None or any(pair is None or pair[1] != first[1] for pair in pairs):
        return None
    return first[0]


def _constants_of_pair(value: onnx_ir.Value | None) -> tuple[Pair, Hashable] | None:
    """Return scale and zero point of the DequantizeLinear of a tensor, as values of the graph and as numbers."""
    maker = maker_of(value, "DequantizeLinear")
    if maker is None or len(maker.inputs) != 3:
        return None
    codes, scale, zero_point = maker.inputs
    if codes is None or (codes.producer() is None and value is not None and _is_weight(value)):
        return None
    steps, zero = constant_of(scale), constant_of(zero_point)
    if scale is None or zero_point is None or steps is None or zero is None or steps.size != 1 or zero.size != 1:
        return None
    return (scale, zero_point), (steps.item(), zero.item(), zero.dtype)


def _is_weight(value: onnx_ir.Value) -> bool:
    """Return whether a layer or a product uses a tensor, directly or after data movement, other than as its first input."""
    return any(index > 0 and _has_weight(user) for user, index in uses_after(value))


def _has_weight(node: onnx_ir.Node) -> bool:
    kinds = OF_ONNX.get(node.op_type, ())
    return any(kind.multiplies or kind.has_weight for kind in kinds)


# ---- int8 values, after which onnxruntime would insert wrong pairs itself


def quantize_moved_codes(model: onnx_ir.Model, opset: int) -> None:
    """Insert a pair with the same scale after each op that moves the values of an int8 DequantizeLinear with one scale.

    No value changes: the moved values are on the grid. onnxruntime's default optimizations insert such pairs, to run the op in
    integers. Its own pairs have the attribute `output_dtype` from opset 21 on, which stays INT8 when it then changes the
    integers to UINT8: the model does not load ("output_dtype INT8 does not match y_zero_point type UINT8", onnxruntime 1.26 to
    1.30).
    """
    waiting = [node for node in model.graph if node.op_type == "DequantizeLinear"] if opset >= OPSET else []
    while waiting:
        dequantize = waiting.pop()
        if not _is_int8_with_one_scale(dequantize) or dequantize.outputs[0].is_graph_output():
            continue
        for mover, index in tuple(dequantize.outputs[0].uses()):
            if mover.op_type in PAIRS_MOVE_PAST and not mover.domain and index == 0:
                waiting += _insert_behind(mover, dequantize)


def _is_int8_with_one_scale(dequantize: onnx_ir.Node) -> bool:
    zero_point = constant_input(dequantize, 2)
    return has_one_scale(dequantize) and zero_point is not None and zero_point.dtype == np.int8


def _insert_behind(mover: onnx_ir.Node, dequantize: onnx_ir.Node) -> list[onnx_ir.Node]:
    """Insert a QuantizeLinear after a node, and a DequantizeLinear for each use; return the latter."""
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
        values = pairs[0].outputs[0]  # what the graph returns from now on, under the same name
        values.name, moved.name = moved.name, f"{moved.name}/moved"
        values.shape, values.type = moved.shape, moved.type
        graph.outputs[graph.outputs.index(moved)] = values
    for (user, index), pair in zip(users, pairs, strict=False):
        user.replace_input_with(index, pair.outputs[0])
    if pairs:
        graph.insert_after(mover, [quantize, *pairs])
    return pairs


def keep_products_of_codes(model: onnx_ir.Model, opset: int) -> None:
    """Give the bias after a product of int8 values the rank of the output, if the rank is above 2.

    Otherwise onnxruntime merges product and bias into a Gemm with a Reshape before it, after which it inserts the pair that
    `quantize_moved_codes` describes.
    """
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


def _is_product_of_codes(node: onnx_ir.Node) -> bool:
    source = maker_of(node.inputs[0], "DequantizeLinear") if node.op_type == "MatMul" else None
    return source is not None and _is_int8_with_one_scale(source)


def _replace_constant(node: onnx_ir.Node, index: int, array: Array, model: onnx_ir.Model) -> None:
    old = present(node.inputs[index], f"input {index} of {node.name!r}")
    dtype = onnx_ir.DataType.from_numpy(array.dtype)
    node.replace_input_with(index, Constants(model.graph).add(array, dtype, f"{old.name}.of_{node.name}"))
