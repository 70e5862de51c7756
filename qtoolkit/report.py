"""quantization_report: what is quantized and how, what stays float and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from qtoolkit.frozen import Grid
from qtoolkit.graph.insert import is_quantizer, role_of
from qtoolkit.graph.kinds import kind_of
from qtoolkit.graph.module import QuantizedGraphModule, Status
from qtoolkit.graph.swap import name_of
from qtoolkit.nn import QuantModule
from qtoolkit.quantizer import TensorQuantizer


@dataclass(frozen=True)
class LayerLine:
    """One layer or op: its name, kind, how its weight and inputs are quantized, and why it is float where it is."""

    name: str
    kind: str
    weight: str
    inputs: tuple[str, ...]
    status: Status
    reason: str


@dataclass(frozen=True)
class TensorLine:
    """One quantized tensor: its quantizer, the op that makes it, the ops that take it, and how it is quantized."""

    quantizer: str
    source: str
    consumers: tuple[str, ...]
    spec: str


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantization_report` returns: data, and a table when printed.

    Attributes:
        layers: Every op of the model, in order.
        tensors: Every quantized activation.
    """

    layers: tuple[LayerLine, ...]
    tensors: tuple[TensorLine, ...]

    @property
    def quantized(self) -> tuple[LayerLine, ...]:
        """The quantized ops."""
        return tuple(line for line in self.layers if line.status == "quantized")

    @property
    def left_float(self) -> tuple[LayerLine, ...]:
        """The ops that stay in float."""
        return tuple(line for line in self.layers if line.status == "float")

    def __str__(self) -> str:
        rows = [("layer", "kind", "weight", "inputs", "status")]
        rows += [(x.name, x.kind, x.weight, ", ".join(x.inputs), x.reason or x.status) for x in self.layers]
        tensors = [("quantizer", "made by", "shared by", "how", "")]
        tensors += [(t.quantizer, t.source, ", ".join(t.consumers), t.spec, "") for t in self.tensors]
        head = f"{len(self.quantized)} ops quantized, {len(self.left_float)} left in float, {len(self.tensors)} tensors"
        return "\n".join([head, "", *_table(rows), "", *_table(tensors)])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def quantization_report(model: nn.Module) -> QuantizationReport:
    """Tell of each op of a prepared or converted model how it is quantized, or why it is not.

    Args:
        model: What `qtoolkit.prepare` or `qtoolkit.convert` returned.

    Returns:
        A report with one line for each op and each quantized tensor; `print` it, or read its fields.

    Raises:
        TypeError: The model was not prepared.
    """
    if not isinstance(model, QuantizedGraphModule):
        raise TypeError(
            f"quantization_report: model must be what qtoolkit.prepare or qtoolkit.convert returned, got "
            f"{type(model).__name__}."
        )
    nodes = list(model.graph.nodes)
    layers = [_layer_line(model, node) for node in nodes if not is_quantizer(node) and _has_line(node)]
    return QuantizationReport(tuple(layers), tuple(_tensor_line(model, n) for n in nodes if is_quantizer(n)))


def _has_line(node: fx.Node) -> bool:
    return node.op in ("call_module", "call_function", "call_method")


def _layer_line(model: QuantizedGraphModule, node: fx.Node) -> LayerLine:
    inputs = tuple(str(n.target) for n in (_origin(model, n) for n in node.all_input_nodes) if is_quantizer(n))
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    quantizers = [q for q, _ in module.quantized_weights().values()] if isinstance(module, QuantModule) else []
    weight = _spec_of(quantizers[0]) if quantizers else ""
    status, reason = model.plan.status[node.name] if model.plan is not None else ("float", "not planned yet")
    return LayerLine(name_of(node), kind_of(node), weight, inputs, status, reason)


def _origin(model: QuantizedGraphModule, node: fx.Node) -> fx.Node:
    """Return the quantizer (or other op) that a tensor comes from, through ops that only move it."""
    moved = model.plan is not None and not is_quantizer(node) and role_of(node, model.plan.backend) == "transparent"
    return _origin(model, node.all_input_nodes[0]) if moved else node


def _tensor_line(model: QuantizedGraphModule, node: fx.Node) -> TensorLine:
    consumers = tuple(name_of(user) for user in node.users)
    return TensorLine(
        str(node.target), node.all_input_nodes[0].name, consumers, _spec_of(model.get_submodule(str(node.target)))
    )


def _spec_of(quantizer: nn.Module | None) -> str:
    return quantizer.spec.describe() if isinstance(quantizer, TensorQuantizer | Grid) else "float"
