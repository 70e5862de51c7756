"""quantization_report: what is quantized and how, what stays float and why."""

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from qtoolkit.frozen import Grid
from qtoolkit.graph.grids import quantizer_behind
from qtoolkit.graph.kind_rules import is_number
from qtoolkit.graph.kinds import OTHER, kind_of, tensor_inputs
from qtoolkit.graph.layer_quantizers import INPUT, ITSELF, LayerQuantizer, layer_quantizers
from qtoolkit.graph.mode import is_mode
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.graph.plan import Status
from qtoolkit.graph.roles import is_quantizer, is_weight_quantizer, quantizes_its_input
from qtoolkit.graph.run_time import BOOKKEEPING
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
    """One quantized tensor: its quantizer, the op that makes it, the ops that take it, and how it is quantized.

    Of a tensor that no op of the graph makes, `source` is a name of its own: `attn.softmax`, `block.conv.input`.
    `shares_scale_with` are the ops whose tensors have the same quantizer.
    """

    quantizer: str
    source: str
    consumers: tuple[str, ...]
    spec: str
    shares_scale_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantization_report` returns: data, and a table when printed.

    Attributes:
        layers: Every op of the model, in order.
        tensors: Every quantized activation: those of the graph, then those that layers quantize themselves.
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
        tensors = [("quantizer", "made by", "taken by", "how", "scale shared with")]
        tensors += [
            (t.quantizer, t.source, ", ".join(t.consumers), t.spec, ", ".join(t.shares_scale_with))
            for t in self.tensors
        ]
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
    quantizers = [node for node in nodes if is_quantizer(node) and not is_weight_quantizer(node)]
    sources: dict[str, list[str]] = defaultdict(list)
    for node in quantizers:
        sources[str(node.target)].append(node.all_input_nodes[0].name)
    layers = [_layer_line(model, node) for node in nodes if _has_line(node)]
    tensors = [_tensor_line(model, node, sources[str(node.target)]) for node in quantizers]
    held = [quantizer for quantizer in layer_quantizers(model) if not quantizer.is_weights]
    layers += [_line_inside(model, name, held) for name in (() if model.plan is None else model.plan.inside)]
    for quantizer in held:
        sources[quantizer.name] += [source for source in quantizer.sources if source not in sources[quantizer.name]]
    tensors += dict.fromkeys(
        line for quantizer in held for line in _tensor_lines_of(quantizer, sources[quantizer.name])
    )
    return QuantizationReport(tuple(layers), tuple(tensors))


def _has_line(node: fx.Node) -> bool:
    is_op = node.op in ("call_module", "call_function", "call_method")
    bookkeeping = (kind_of(node) == OTHER and _only_arranges(node)) or is_number(node) or is_mode(node)
    return is_op and not is_quantizer(node) and not bookkeeping


def _only_arranges(node: fx.Node) -> bool:
    """Return whether an op that the table does not know takes an item out of others, or puts values together."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], int | str)
    makes_tuple = isinstance(node.target, type) and issubclass(node.target, tuple)
    return node.target in BOOKKEEPING or makes_tuple


def _layer_line(model: QuantizedGraphModule, node: fx.Node) -> LayerLine:
    status, reason = model.plan.status[node.name] if model.plan is not None else ("float", "not planned yet")
    behind = [] if model.plan is None else [quantizer_behind(n, model.plan.backend) for n in tensor_inputs(node)]
    weights = [str(n.target) for n in behind if n is not None and is_weight_quantizer(n)]
    inputs = tuple(str(n.target) for n in behind if n is not None and not is_weight_quantizer(n))
    inputs += (f"{node.target}.input_quantizer",) if quantizes_its_input(node) else ()
    return LayerLine(name_of(node), kind_of(node), _weight_of(model, node, weights), inputs, status, reason)


def _weight_of(model: QuantizedGraphModule, node: fx.Node, quantizers: list[str]) -> str:
    """Return how a layer's weight is quantized, or a function's."""
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, QuantModule):
        return ", ".join(dict.fromkeys(_spec_of(quantizer) for quantizer in module.weight_quantizers().values()))
    return ", ".join(_spec_of(model.get_submodule(name)) for name in quantizers)


def _tensor_line(model: QuantizedGraphModule, node: fx.Node, sources: list[str]) -> TensorLine:
    source = node.all_input_nodes[0].name
    consumers = tuple(name_of(user) for user in node.users)
    others = tuple(name for name in sources if name != source)
    return TensorLine(str(node.target), source, consumers, _spec_of(model.get_submodule(str(node.target))), others)


def _line_inside(model: QuantizedGraphModule, name: str, held: Sequence[LayerQuantizer]) -> LayerLine:
    """Return the line of a layer inside a submodule that is kept whole."""
    layer = model.get_submodule(name)
    status, reason = model.plan.inside[name] if model.plan is not None else ("float", "not planned yet")
    kind = layer.KIND if isinstance(layer, QuantModule) else OTHER
    inputs = dict.fromkeys(q.name for q in held if q.module is layer and q.attribute == INPUT)
    return LayerLine(name, kind, _weight_inside(layer), tuple(inputs), status, reason)


def _tensor_lines_of(held: LayerQuantizer, sources: list[str]) -> list[TensorLine]:
    """Return the lines of the tensors that a layer quantizes itself, by a quantizer of these and maybe more."""
    how = _spec_of(held.quantizer)
    consumers = held.consumers if held.attribute == ITSELF else (held.layer,)
    return [
        TensorLine(held.name, source, consumers, how, tuple(name for name in sources if name != source))
        for source in held.sources
    ]


def _weight_inside(layer: nn.Module) -> str:
    quantizers = list(layer.weight_quantizers().values()) if isinstance(layer, QuantModule) else []
    return _spec_of(quantizers[0]) if quantizers else ""


def _spec_of(quantizer: nn.Module | None) -> str:
    return quantizer.spec.describe() if isinstance(quantizer, TensorQuantizer | Grid) else "float"
