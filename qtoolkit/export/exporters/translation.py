"""Translation of quantizing ops for both torch exporters: each call becomes one placeholder node.

The placeholder, `qtoolkit::FakeQuant`, has the op's arguments as attributes. `qtoolkit.export.pairs.lowering` replaces it by
QuantizeLinear and DequantizeLinear once the model has its final opset, for both exporters alike.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir
import onnxscript
import torch
from onnx import defs
from onnx_ir import DataType, Value

from qtoolkit.errors import present
from qtoolkit.export.exporters.plain import op_in_torchscript, type_in_torchscript
from qtoolkit.export.pairs.storage import Rounding

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

# A Value. torch's exporter reads the annotations of translations, and warns of this type, which it does not know.
Translated = Any
Results = tuple[Translated, Translated]  # of an op: its values and its mask
Arguments = Mapping[str, Any]  # of an op, by the names of its schema
DOMAIN, PLACEHOLDER = "qtoolkit", "FakeQuant"
CHANNELS = ("axis", "group", "block_size")
QUANTIZER = "quantizer"  # a note in the metadata, then an attribute: the name of the quantizer
_OPSET = onnxscript.opset18  # the first of the translations in torchlib


def placeholders_in(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Return the placeholders of a model, including its subgraphs."""
    return [node for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph) if node.domain == DOMAIN]


def keep_quantizers(model: onnx_ir.Model) -> None:
    """Store the metadata of placeholders as attributes, which survive conversions; merge equal placeholders before."""
    for node in placeholders_in(model):
        if QUANTIZER in node.metadata_props:
            node.attributes[QUANTIZER] = onnx_ir.AttrString(QUANTIZER, node.metadata_props[QUANTIZER])


def _attributes(dtype: DataType, shape: Iterable[object], how: Rounding) -> dict[str, int | str | Sequence[int]]:
    """Return the placeholder's attributes; dynamic sizes are -1, and absent values are omitted."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    values = (int(dtype), sizes, how.format, *how.code_range, how.axis, how.group, how.block_size)
    given = dict(zip(("dtype", "shape", "format", "qmin", "qmax", *CHANNELS), values, strict=True))
    return {name: value for name, value in given.items() if value is not None and value != []}


def rounding_of(placeholder: onnx_ir.Node) -> Rounding:
    """Return the rounding parameters of a placeholder from its attributes."""
    given = {key: attribute.value for key, attribute in placeholder.attributes.items()}
    channels = given.get("axis"), given.get("group", 1), given.get("block_size", 0)
    return Rounding(given["format"], (given["qmin"], given["qmax"]), *channels)


@functools.cache
def _schema() -> defs.OpSchema:
    """Return the placeholder's schema, which onnxscript needs to write a node."""
    kinds = {"dtype": "INT", "shape": "INTS", "format": "STRING", "qmin": "INT", "qmax": "INT"}
    kinds |= dict.fromkeys(CHANNELS, "INT")
    optional = defs.OpSchema.FormalParameterOption.Optional
    return defs.OpSchema(
        PLACEHOLDER,
        DOMAIN,
        1,
        inputs=[
            defs.OpSchema.FormalParameter("x", "T"),
            defs.OpSchema.FormalParameter("scale", "S"),
            defs.OpSchema.FormalParameter("zero_point", "S", param_option=optional),
        ],
        outputs=[defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[(name, sorted(_FLOATS), "") for name in ("T", "S")],
        attributes=[
            defs.OpSchema.Attribute(name, getattr(defs.OpSchema.AttrType, kind), required=False)
            for name, kind in kinds.items()
        ],
    )


_FLOATS = {f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")}


def _write(x: Value, scale: Value, zero_point: Value | None, how: Rounding) -> Results:
    op = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), PLACEHOLDER, _schema())
    y = op(x, scale, zero_point, **_attributes(present(x.dtype, f"the type of {x.name!r}"), x.shape or (), how))
    return y, _OPSET.Constant(value_ints=[])  # the mask, which nothing takes


def placeholder(inputs: Sequence[Value], settings: Arguments) -> onnx_ir.Node:
    """Return the placeholder of a call; `settings` are the op's other arguments by name."""
    code_range = settings.get("qmin", 0), settings.get("qmax", 0)
    how = Rounding(settings.get("format", "int"), code_range, *(settings[name] for name in CHANNELS))
    x = inputs[0]
    attributes = _attributes(present(x.dtype, f"the type of {x.name!r}"), x.shape or (), how)
    return onnx_ir.node(PLACEHOLDER, inputs, attributes, domain=DOMAIN)


def _fake_quant(
    x: Translated,
    scale: Translated,
    zero_point: Translated,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    grad_factor: float = 1.0,
    mask: bool = False,
) -> Results:
    """Write one call. The exporter matches these parameters with the op's schema, so all are listed."""
    return _write(x, scale, zero_point, Rounding("int", (qmin, qmax), axis, group, block_size))


def _fake_quant_float(
    x: Translated,
    scale: Translated,
    format: str,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    mask: bool = False,
) -> Results:
    return _write(x, scale, None, Rounding(format, (0, 0), axis, group, block_size))


TRANSLATIONS: Mapping[Callable[..., object], Callable[..., Results]] = {
    torch.ops.qtoolkit.fake_quant.default: _fake_quant,
    torch.ops.qtoolkit.fake_quant_float.default: _fake_quant_float,
}


def placeholder_in_torchscript(g: "GraphContext", inputs: Sequence["torch.Value"], how: Rounding) -> "torch.Value":
    """Write the placeholder of a call into a graph of the TorchScript exporter."""
    dtype, sizes = type_in_torchscript(inputs[0])
    attributes = _attributes(dtype, sizes or (), how)
    named = {f"{name}_{'s' if isinstance(value, str) else 'i'}": value for name, value in attributes.items()}
    return op_in_torchscript(g, f"{DOMAIN}::{PLACEHOLDER}", *inputs, **named)
