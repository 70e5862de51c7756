"""Q/DQ pairs behind ops that move values, so that a runtime executes these ops on codes."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from qtoolkit.export.files.graph import constant_input, maker_of
from qtoolkit.export.files.kinds import CAST, kind_by_op
from qtoolkit.op_kinds.table import OTHER

if TYPE_CHECKING:
    import onnx_ir


def repeat_pairs(model: "onnx_ir.Model", ops: Collection[str]) -> None:
    """Repeat the pair of a tensor behind ops of these types. No code changes: the values lie on the pair's grid already.

    onnxruntime fuses a concat, a resize or a split only between pairs, and a layer only right behind a DequantizeLinear.
    """
    for node in list(model.graph):
        moved = moved_inputs(node) if node.op_type in ops else ()
        pair = _pair_of(moved) if moved else None
        for output in _moved_outputs(node) if pair is not None else ():
            users = list(output.uses())
            if not output.is_graph_output() and any(user.op_type != "QuantizeLinear" for user, _ in users):
                last = _insert_pair(model, node, output, pair)
                for user, index in users:
                    user.replace_input_with(index, last)


def moved_inputs(node: "onnx_ir.Node") -> "Sequence[onnx_ir.Value | None]":
    """Return the tensors whose values, and zeros, are the values of a node's outputs; none for a node that computes others."""
    kind = OTHER if node.op_type == CAST else kind_by_op(node)
    return node.inputs if kind.concatenates else node.inputs[:1] if kind.moves else ()


def is_on_codes(value: "onnx_ir.Value") -> bool:
    """Return whether a tensor has the values of codes: of a DequantizeLinear, or moved from there."""
    waiting: list[onnx_ir.Value | None] = [value]
    seen: set[onnx_ir.Value] = set()
    while waiting:
        maker = None if (last := waiting.pop()) is None else last.producer()
        if last is None or last in seen or (maker is not None and maker.op_type == "DequantizeLinear"):
            continue
        seen.add(last)
        moved = () if maker is None else moved_inputs(maker)
        if not moved:
            return False
        waiting += moved
    return True


def _moved_outputs(node: "onnx_ir.Node") -> "Sequence[onnx_ir.Value]":
    return node.outputs if node.op_type == "Split" else node.outputs[:1]  # a max pool's others are positions


def _insert_pair(model: "onnx_ir.Model", node: "onnx_ir.Node", output: "onnx_ir.Value", pair: Any) -> "onnx_ir.Value":
    import onnx_ir

    quantize = onnx_ir.node("QuantizeLinear", [output, *pair], name=f"{output.name}_quantize")
    mixed = output.dtype is not None and pair[0].dtype not in (None, output.dtype)  # a model in half precision
    attributes = {"output_dtype": int(output.dtype)} if mixed and output.dtype is not None else {}
    source = None if node.inputs[0] is None else node.inputs[0].producer()
    if source is not None and "output_dtype" in source.attributes:  # the TorchScript exporter writes few types
        attributes = {"output_dtype": source.attributes.get_int("output_dtype", 0)}
    inputs = [quantize.outputs[0], *pair]
    dequantize = onnx_ir.node("DequantizeLinear", inputs, attributes, name=f"{output.name}_dequantize")
    for new, like in ((quantize, pair[1]), (dequantize, output)):
        new.outputs[0].shape = output.shape
        if like.dtype is not None:  # the TorchScript exporter writes few types
            new.outputs[0].dtype = like.dtype
    model.graph.insert_after(node, [quantize, dequantize])
    return dequantize.outputs[0]


def _pair_of(values: "Sequence[onnx_ir.Value | None]") -> Any:
    """Return the scale and the zero point that all of these tensors have; None if they do not come from such pairs."""
    pairs = [_constants_of_pair(value) for value in values]
    first = pairs[0]
    if first is None or any(pair is None or pair[1:] != first[1:] for pair in pairs):
        return None
    return first[0]


def _constants_of_pair(value: "onnx_ir.Value | None") -> Any:
    """Return scale and zero point of the DequantizeLinear that computes a tensor, as values of the graph and as numbers."""
    maker = maker_of(value, "DequantizeLinear")
    if maker is None or len(maker.inputs) != 3:
        return None
    codes = maker.inputs[0]
    if codes is None or codes.producer() is None:  # of a weight
        return None
    scale, zero_point = constant_input(maker, 1), constant_input(maker, 2)
    if scale is None or zero_point is None or scale.size != 1 or zero_point.size != 1:
        return None
    return maker.inputs[1:], scale.item(), zero_point.item(), zero_point.dtype
