"""Rewrites of an exported graph that let runtimes use their integer kernels. No code changes by them.

- A mean over the image of each channel becomes a GlobalAveragePool: runtimes have no integer kernel for ReduceMean.
- A PRelu with one slope becomes a LeakyRelu, for the same reason.
- For targets that ask for it (`Backend.repeated_pairs`), the Q/DQ pair of a tensor is repeated behind ops that move its
  values. onnxruntime then moves codes, and sees the DequantizeLinear in front of the next layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qtoolkit.export.saturation import constant_input

if TYPE_CHECKING:
    import onnx_ir

    from qtoolkit.backends import Backend


def make_fusible(model: "onnx_ir.Model", backend: "Backend") -> None:
    """Rewrite an exported model for a target's integer kernels."""
    for node in list(model.graph):
        if node.op_type == "ReduceMean":
            _pool_globally(model.graph, node)
        elif node.op_type == "PRelu":
            _use_one_slope(model.graph, node)
        elif node.op_type in backend.repeated_pairs:
            _repeat_pair(model.graph, node)


def _pool_globally(graph: Any, mean: "onnx_ir.Node") -> None:
    import onnx_ir

    source, axes = mean.inputs[0], _axes(mean)
    shape = None if source is None else source.shape
    if shape is None or len(shape) != 4 or {axis % 4 for axis in axes} != {2, 3}:
        return
    keeps = mean.attributes["keepdims"].as_int() if "keepdims" in mean.attributes else 1
    pool = _node("GlobalAveragePool", mean.inputs[:1], mean)
    if keeps:
        _replace(graph, mean, [pool])
        return
    pool.outputs[0].shape = onnx_ir.Shape([*shape[:2], 1, 1])
    axes = _vector(graph, f"{mean.name}_axes", [2, 3])
    _replace(graph, mean, [pool, _node("Squeeze", [pool.outputs[0], axes], mean, name=f"{mean.name}_squeeze")])


def _axes(mean: "onnx_ir.Node") -> list[int]:
    """Return the axes of a ReduceMean: an attribute up to opset 17, an input from 18 on; [] if they are not constants."""
    if "axes" in mean.attributes:
        return list(mean.attributes["axes"].as_ints())
    axes = constant_input(mean, 1)
    return [] if axes is None else [int(axis) for axis in axes]


def _use_one_slope(graph: Any, prelu: "onnx_ir.Node") -> None:
    slope = constant_input(prelu, 1)
    if slope is not None and slope.size == 1:
        _replace(graph, prelu, [_node("LeakyRelu", prelu.inputs[:1], prelu, {"alpha": float(slope.item())})])


def _repeat_pair(graph: Any, node: "onnx_ir.Node") -> None:
    """Write the pair of a node's inputs behind each of its outputs, if all inputs have the same."""
    pair = _pair_of(node.inputs if node.op_type == "Concat" else node.inputs[:1])
    for output in node.outputs if pair is not None else ():
        users = list(output.uses())
        if output.is_graph_output() or all(user.op_type == "QuantizeLinear" for user, _ in users):
            continue
        quantize = _node("QuantizeLinear", [output, *pair], node, name=f"{output.name}_quantize")
        dequantize = _node("DequantizeLinear", [quantize.outputs[0], *pair], node, name=f"{output.name}_dequantize")
        for new, like in ((quantize, pair[1]), (dequantize, output)):
            new.outputs[0].shape = output.shape
            if like.dtype is not None:  # the TorchScript exporter writes few types
                new.outputs[0].dtype = like.dtype
        graph.insert_after(node, [quantize, dequantize])
        for user, index in users:
            user.replace_input_with(index, dequantize.outputs[0])


def _pair_of(values: Sequence["onnx_ir.Value | None"]) -> Any:
    """Return the scale and the zero point that all of these tensors have; None if they do not come from such pairs."""
    pairs = [_constants_of_pair(value) for value in values]
    first = pairs[0]
    if first is None or any(pair is None or pair[1:] != first[1:] for pair in pairs):
        return None
    return first[0]


def _constants_of_pair(value: "onnx_ir.Value | None") -> Any:
    """Return scale and zero point of the DequantizeLinear that computes a tensor, as values of the graph and as numbers."""
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "DequantizeLinear" or len(maker.inputs) != 3:
        return None
    scale, zero_point = constant_input(maker, 1), constant_input(maker, 2)
    if scale is None or zero_point is None or scale.size != 1 or zero_point.size != 1:
        return None
    return maker.inputs[1:], scale.item(), zero_point.item(), zero_point.dtype


def _node(op_type: str, inputs: Any, like: Any, attributes: Any = None, name: str | None = None) -> Any:
    import onnx_ir

    return onnx_ir.node(op_type, inputs, attributes, name=like.name if name is None else name)


def _vector(graph: Any, name: str, values: list[int]) -> Any:
    import numpy as np
    import onnx_ir

    tensor = onnx_ir.tensor(np.array(values, np.int64), name=name)
    shape, kind = onnx_ir.Shape([len(values)]), onnx_ir.TensorType(tensor.dtype)
    value = onnx_ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def _replace(graph: Any, node: "onnx_ir.Node", nodes: list[Any]) -> None:
    """Put nodes in the place of one; the last takes over its output."""
    import onnx_ir

    onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [node.outputs[0]], [nodes[-1].outputs[0]])
