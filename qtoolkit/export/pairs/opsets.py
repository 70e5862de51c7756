"""ONNX opsets: the opset that a file needs, the opsets that torch writes, and conversion between them."""

from collections.abc import Callable, Mapping

import onnx
import onnx_ir
import torch
from onnx import helper
from onnx.defs import OpSchema
from onnxscript import version_converter

from qtoolkit.export.files.graph import constant_input, input_at, replace_node
from qtoolkit.export.inputs import ExportSource
from qtoolkit.lint.ops import AXIS_OPSET

LOWEST = AXIS_OPSET
DEFAULT = 18
BFLOAT16 = 22  # the first whose convolutions take bfloat16
NATIVE = {"dynamo": (18, 23), "torchscript": (13, 20)}  # those that torch's exporters write without conversion
SCRIPT_NEWEST = 25  # the newest that onnxscript's converter knows


def choose(opset: int | None, source: ExportSource, float_type: str | None = None) -> int:
    """Return the opset of a file. Raises ValueError: ONNX does not have it, or it cannot express the model's quantizers."""
    from qtoolkit.export.pairs.lowering import HALF_OPSET
    from qtoolkit.export.pairs.storage import smallest_opset

    needed = {
        name: smallest_opset(g.spec.element, g.spec.qmin, g.spec.qmax, g.spec.block_size)
        for name, g in source.grids.items()
        if g.quantizing
    }
    most = max(needed, key=lambda name: needed[name], default=None)
    least = LOWEST if most is None else needed[most]
    if opset is None:
        preferred = BFLOAT16 if any(p.dtype == torch.bfloat16 for p in source.model.parameters()) else DEFAULT
        return max(preferred, least, HALF_OPSET if float_type == "float16" else 0)
    check_opset("export_onnx", opset)
    if float_type == "float16" and opset < HALF_OPSET:
        raise ValueError(
            f'export_onnx: float_type="float16" needs opset {HALF_OPSET} or newer, in which Q/DQ nodes accept float16, got '
            f'{opset}; leave opset out, or pass float_type="float32".'
        )
    if most is not None and opset < least:
        raise ValueError(
            f"export_onnx: opset must be at least {least} for {most!r}, which quantizes to "
            f"{source.grids[most].spec.describe()}, got {opset}."
        )
    return opset


def check_opset(what: str, opset: object) -> None:
    """Raise ValueError unless the installed onnx has the opset, and it is at least LOWEST."""
    newest = onnx.defs.onnx_opset_version()
    if type(opset) is not int or not LOWEST <= opset <= newest:
        raise ValueError(
            f"{what}: opset must be a whole number in [{LOWEST}, {newest}] (limits of the installed onnx), got {opset!r}."
        )


def native(opset: int, exporter: str) -> int:
    """Return the nearest opset that a torch exporter writes."""
    low, high = NATIVE[exporter]
    return min(max(opset, low), high)


def convert_opset(model: onnx_ir.Model, opset: int, exporter: str, what: str) -> onnx_ir.Model:
    """Convert a model to an opset. Nodes of other domains stay as they are. Errors begin with `what`, the public function.

    Raises RuntimeError: an op of the model does not exist there with these attributes.
    """
    own = model.opset_imports[""]
    if opset < own:
        _lower_opset(model, opset, exporter, what)
    for step in (min(opset, SCRIPT_NEWEST), opset):
        if step > model.opset_imports[""]:
            version_converter.convert_version(model, step, fallback=True)
    if model.opset_imports[""] != opset:
        raise RuntimeError(
            f"{what}: the model cannot be converted from opset {own}, which torch writes, to opset {opset}; pass opset={own}."
        )
    model.ir_version = helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    return model


def _lower_opset(model: onnx_ir.Model, opset: int, exporter: str, what: str) -> None:
    """Rewrite the nodes of a model for an older opset, which has fewer types and attributes."""
    for node in list(onnx_ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain:
            continue
        if not onnx.defs.has(node.op_type, opset):
            written = WRITTEN_OUT.get(node.op_type)
            if written is None:
                raise RuntimeError(f"{what}: {_refusal(node, opset, exporter)}")
            written(node)
            continue
        older = onnx.defs.get_schema(node.op_type, opset, "")
        if older.since_version == onnx.defs.get_schema(node.op_type, model.opset_imports[""], "").since_version:
            continue
        lowered = LOWERED.get(node.op_type)
        if lowered is not None:
            lowered(node, older)
        if set(node.attributes) - set(older.attributes) or len(node.inputs) > older.max_input:
            raise RuntimeError(f"{what}: {_refusal(node, opset, exporter)}")
    model.opset_imports[""] = opset


def _refusal(node: onnx_ir.Node, opset: int, exporter: str) -> str:
    other = "exporter='torchscript'" if exporter == "dynamo" else f"opset={NATIVE[exporter][0]}"
    return f"opset {opset} has no equivalent of this {node.op_type}; pass {other} or a newer opset."


def _take_axes(node: onnx_ir.Node, older: OpSchema) -> None:
    """Make the axes of a reduction, a constant input, an attribute."""
    if input_at(node, 1) is not None and "axes" in older.attributes:
        axes = constant_input(node, 1)
        if axes is None:
            return
        node.attributes["axes"] = onnx_ir.AttrInt64s("axes", [int(axis) for axis in axes.reshape(-1)])
        node.resize_inputs(1)
    if not _value(node, "noop_with_empty_axes"):
        node.attributes.pop("noop_with_empty_axes", None)


def _take_defaults(node: onnx_ir.Node, older: OpSchema) -> None:
    """Drop attributes that the older op lacks, if they have its default behaviour."""
    for name, default in DEFAULTS[node.op_type].items():
        if name not in older.attributes and _value(node, name) in (default, None):
            node.attributes.pop(name, None)


def _take_shape(node: onnx_ir.Node, older: OpSchema) -> None:
    """Drop `allowzero` of a shape without zeros, where it has no effect."""
    shape = constant_input(node, 1)
    if not _value(node, "allowzero") or (shape is not None and shape.all()):
        node.attributes.pop("allowzero", None)


def _take_parts(node: onnx_ir.Node, older: OpSchema) -> None:
    """Drop the number of parts if they are equal: the outputs give it."""
    source = input_at(node, 0)
    size = None if source is None or source.shape is None else source.shape[node.attributes.get_int("axis", 0)]
    if isinstance(size, int) and size % len(node.outputs) == 0:
        node.attributes.pop("num_outputs", None)


def _write_hard_swish(node: onnx_ir.Node) -> None:
    """Write HardSwish, which opset 14 introduced, as x * HardSigmoid(x)."""
    gate = onnx_ir.node("HardSigmoid", node.inputs, {"alpha": 1 / 6, "beta": 0.5}, name=f"{node.name}/gate")
    product = onnx_ir.node("Mul", [*node.inputs, *gate.outputs], name=node.name)
    replace_node(node, [gate, product], product.outputs[0])


def _value(node: onnx_ir.Node, name: str) -> object:
    return node.attributes[name].value if name in node.attributes else None


# Attributes that newer forms of an op have, with the values at which it is the older op.
DEFAULTS: Mapping[str, Mapping[str, int | str]] = {
    "BatchNormalization": {"training_mode": 0},
    "GRU": {"layout": 0},
    "LSTM": {"layout": 0},
    "RNN": {"layout": 0},
    "Resize": {"antialias": 0, "keep_aspect_ratio_policy": "stretch"},
    "ScatterElements": {"reduction": "none"},
    "ScatterND": {"reduction": "none"},
}
WRITTEN_OUT: Mapping[str, Callable[[onnx_ir.Node], None]] = {"HardSwish": _write_hard_swish}
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
LOWERED: Mapping[str, Callable[[onnx_ir.Node, OpSchema], None]] = {
    **{f"Reduce{name}": _take_axes for name in REDUCTIONS},
    **dict.fromkeys(DEFAULTS, _take_defaults),
    "Reshape": _take_shape,
    "Split": _take_parts,
}
