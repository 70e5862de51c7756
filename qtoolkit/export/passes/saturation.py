"""Clips in front of a QuantizeLinear whose saturation does the same."""

from typing import TYPE_CHECKING

import numpy as np

from qtoolkit.export.files.graph import constant_input
from qtoolkit.export.files.kinds import bounds_of, ops_where

if TYPE_CHECKING:
    import onnx_ir

CLIPS = ops_where(lambda kind: kind.clips)


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


def quantizer_behind(value: "onnx_ir.Value") -> "tuple[onnx_ir.Node | None, list[onnx_ir.Value]]":
    """Return the QuantizeLinear that alone takes a value, or takes it behind activations, and the outputs of these."""
    joined: list[onnx_ir.Value] = []
    while not value.is_graph_output() and len(value.uses()) == 1:
        ((user, index),) = value.uses()
        if user.op_type == "QuantizeLinear":
            return user, joined
        if user.op_type not in CLIPS or index != 0:
            break
        value = user.outputs[0]
        joined.append(value)
    return None, joined
