"""Kinds of ONNX's ops, by their names, attributes and constant inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qtoolkit.export.files.graph import constant_input, input_at
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.rules import is_over_image
from qtoolkit.op_kinds.table import KINDS, OF_ONNX, OTHER

if TYPE_CHECKING:
    import onnx_ir

# Ops that may be layers with a weight.
WEIGHTED = frozenset(op for op, kinds in OF_ONNX.items() if any(kind.layer for kind in kinds))
CAST = "Cast"  # of kind "identity", but it may round
# Of x + y, x * y, ...: the kind for two tensors, and for a tensor and a constant.
BINARY: Mapping[str, tuple[OpKind, OpKind]] = {
    op: (kinds[0], kinds[1]) for op, kinds in OF_ONNX.items() if len(kinds) == 2 and kinds[1].with_constant
}


def bounds_of(node: "onnx_ir.Node") -> tuple[float, float] | None:
    """Return the bounds of a Clip, infinite if absent; None for other nodes, and for computed bounds."""
    if node.op_type != "Clip":
        return None
    bounds = []
    for index, absent in ((1, -np.inf), (2, np.inf)):
        value = np.array(absent) if input_at(node, index) is None else constant_input(node, index)
        if value is None or value.size != 1:
            return None
        bounds.append(float(value.item()))
    return bounds[0], bounds[1]


def _clip(node: "onnx_ir.Node") -> str:
    bounds = bounds_of(node)
    return "relu6" if bounds is not None and bounds[0] >= 0 else "clamp"


def _resize(node: "onnx_ir.Node") -> str:
    return f"upsample_{node.attributes.get_string('mode', 'nearest')}"


def _pad(node: "onnx_ir.Node") -> str:
    if node.attributes.get_string("mode", "constant") != "constant":
        return "edge_pad"
    value = np.zeros(()) if input_at(node, 2) is None else constant_input(node, 2)
    return "zero_pad" if value is not None and not value.any() else "pad"


def axes_of(reduction: "onnx_ir.Node") -> list[int] | None:
    """Return the axes over which a node reduces; None if they are computed, or all."""
    if input_at(reduction, 1) is None:  # an attribute before opset 18
        given = reduction.attributes.get_ints("axes")
        return None if given is None else list(given)
    axes = constant_input(reduction, 1)
    return None if axes is None else [int(axis) for axis in axes]


def _over_image(node: "onnx_ir.Node") -> bool:
    """Return whether a node reduces all dimensions of an image."""
    source = input_at(node, 0)
    shape = None if source is None else source.shape
    return is_over_image(axes_of(node), None if shape is None else len(shape))


DECIDED: Mapping[str, Callable[["onnx_ir.Node"], str]] = {
    "Clip": _clip,
    "Resize": _resize,
    "Upsample": _resize,
    "Pad": _pad,
    "ReduceMean": lambda node: "avg_pool" if _over_image(node) else "mean",
}


def kind_by_op(node: "onnx_ir.Node") -> OpKind:
    """Return the kind of a node by its op, attributes and constants; OTHER if it depends on other inputs."""
    if node.domain not in ("", "ai.onnx"):
        return OTHER
    if (decide := DECIDED.get(node.op_type)) is not None:
        return KINDS.get(decide(node), OTHER)
    kinds = OF_ONNX.get(node.op_type, ())
    return kinds[0] if len(kinds) == 1 else OTHER


def ops_where(holds: Callable[[OpKind], bool]) -> frozenset[str]:
    """Return the ONNX ops for which a condition holds for all kinds; never a Cast, which may round."""
    return frozenset(op for op, kinds in OF_ONNX.items() if op != CAST and all(map(holds, kinds)))


def moved_inputs(node: "onnx_ir.Node") -> Sequence["onnx_ir.Value | None"]:
    """Return the inputs whose values, or zeros, a node moves to its outputs; none for a node that computes."""
    kind = OTHER if node.op_type == CAST else kind_by_op(node)
    return node.inputs if kind.concatenates else node.inputs[:1] if kind.moves else ()


def moved_from(value: "onnx_ir.Value") -> list["onnx_ir.Value"]:
    """Return the values that data movement takes to a value; none for the result of another op."""
    maker = value.producer()
    return [] if maker is None else [source for source in moved_inputs(maker) if source is not None]


def uses_after(value: "onnx_ir.Value") -> Iterator[tuple["onnx_ir.Node", int]]:
    """Yield the uses of a value, directly or after data movement: each a node and the position of its input."""

    def moved_to(value: "onnx_ir.Value") -> list["onnx_ir.Value"]:
        return [output for user, _ in value.uses() if value in moved_inputs(user) for output in user.outputs]

    return (use for each in reached([value], moved_to) for use in each.uses())
