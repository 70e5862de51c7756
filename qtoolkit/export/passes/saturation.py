"""Clips in front of a QuantizeLinear whose saturation does the same."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir

JOINED = ("Relu", "Clip")


def drop_saturated_clips(model: "onnx_ir.Model") -> None:
    """Remove each Clip whose bounds the QuantizeLinear behind it maps to its lowest and its highest code, or beyond.

    No code changes. onnxruntime's default optimizations need it: if the range of the codes ends at most half a step beyond a
    bound (6 of ReLU6), they fuse the convolution before the Clip but keep the Clip, and the model does not load ("two nodes
    with same node name").
    """
    for node in list(model.graph):
        if node.op_type == "Clip" and _is_saturated(node):
            source, output = node.inputs[0], node.outputs[0]
            for user, index in tuple(output.uses()):
                user.replace_input_with(index, source)
            model.graph.remove(node, safe=True)


def _is_saturated(clip: "onnx_ir.Node") -> bool:
    output = clip.outputs[0]
    users = [user for user, _ in output.uses()]
    if output.is_graph_output() or len(users) != 1 or users[0].op_type != "QuantizeLinear":
        return False
    scale, zero_point = (constant_input(users[0], index) for index in (1, 2))
    bounds = bounds_of(clip)
    if bounds is None or scale is None or zero_point is None or scale.size != 1 or zero_point.dtype.kind not in "iu":
        return False
    codes = np.iinfo(zero_point.dtype)
    low, high = (np.rint(np.asarray(bound, scale.dtype) / scale) + zero_point for bound in bounds)
    return bool((low <= codes.min).all() and (high >= codes.max).all())


def bounds_of(node: "onnx_ir.Node") -> tuple[float, float] | None:
    """Return the bounds of a Clip, infinite where it has none; None of other nodes, and where they are computed."""
    if node.op_type != "Clip":
        return None
    bounds = []
    for index, absent in ((1, -np.inf), (2, np.inf)):
        given = len(node.inputs) > index and node.inputs[index] is not None
        value = constant_input(node, index) if given else np.array(absent)
        if value is None or value.size != 1:
            return None
        bounds.append(float(value.item()))
    return bounds[0], bounds[1]


def quantizer_behind(value: "onnx_ir.Value") -> "tuple[onnx_ir.Node | None, list[onnx_ir.Value]]":
    """Return the QuantizeLinear that alone takes a value, or takes it behind activations, and the outputs of these."""
    joined: list[onnx_ir.Value] = []
    while not value.is_graph_output() and len(value.uses()) == 1:
        ((user, index),) = value.uses()
        if user.op_type == "QuantizeLinear":
            return user, joined
        if user.op_type not in JOINED or index != 0:
            break
        value = user.outputs[0]
        joined.append(value)
    return None, joined


def constant_input(node: "onnx_ir.Node", index: int) -> "np.ndarray[Any, Any] | None":
    """Return the value of a node's input; None if the node does not have it, or if it is computed."""
    import onnx_ir

    value = node.inputs[index] if len(node.inputs) > index else None
    tensor = None if value is None else onnx_ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()
