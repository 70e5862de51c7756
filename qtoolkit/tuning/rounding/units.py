"""Units: parts of a prepared graph with jointly learned rounding, a layer or a block each.

A unit has one output tensor. It starts with the quantizers of its inputs, if nothing else uses them, and ends before the next
quantizer. Blocks are found from the graph:

- A section between two points with a single tensor is a block if it branches: a residual block, an attention, an inception
  module.
- The other layers of a submodule with a single output are a block if they are few.
- Every other layer is a separate unit.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from qtoolkit.errors import check_known
from qtoolkit.graph.block_calls import ROOT, ancestors
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls
from qtoolkit.graph.nodes import is_quantizer, is_weight_quantizer, kind_of, kind_of_module
from qtoolkit.graph.program.division import free_nodes
from qtoolkit.nn import QuantModule, QuantWeighted
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.rules import called_module
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.shared_modules import names_by_module, owners_of_parameters

MOST_IN_REGION = 12  # layers of a branching stretch; the encoder and decoder of a U-Net are one stretch
MOST_IN_MODULE = 4  # layers of a submodule without branches


@dataclass(frozen=True)
class RoundingUnit:
    """A part of a graph with one output."""

    # the dotted name of the layer, or of the submodule with all layers of a block; else the first and last layer
    name: str
    layers: tuple[str, ...]  # the dotted names of the layers whose rounding is learned
    nodes: tuple[fx.Node, ...]  # the nodes of the part, in order
    inputs: tuple[fx.Node, ...]  # the nodes outside whose values it takes, in order
    output: fx.Node  # its node whose value others take

    def activation_quantizers(self) -> list[TensorQuantizer]:
        """Return the quantizers of activations that are called in the unit and nowhere else."""
        calls, inside = ModuleCalls(self.output.graph).of_type(TensorQuantizer), set(self.nodes)
        found = [quantizer for quantizer, nodes in calls.items() if inside.issuperset(nodes)]
        return [each for each in found if each.inserted and not each.of_weight and each.quantizing]


def find_units(
    gm: QuantizedGraphModule, blocks: bool, layers: Sequence[str] | None, what: str
) -> tuple[list[RoundingUnit], dict[str, str]]:
    """Return the units of a prepared model in the order in which they run, and the reasons for all other layers.

    Without `blocks` each layer is a unit. `layers` are the layers to use; None uses all supported layers. Raises ValueError,
    which begins with `what`: a name is unknown, or its layer is not supported.
    """
    graph = _GraphOfUnits(gm)
    reasons = obstacles(gm)
    for name in reasons:
        count = len(graph.calls.of(gm.get_submodule(name)))
        if count > 1:
            reasons[name] = f"the model calls it {count} times, so it has several outputs"
        elif not count:
            reasons[name] = "the graph does not call it: it is inside a leaf module, or nothing uses it"
    reasons |= obstacles_of_functions(gm)
    wanted = chosen(reasons, layers, what)
    free = {str(node.target): node for node in graph.nodes if node.op == "call_module" and str(node.target) in wanted}
    units = _blocks(graph, free) if blocks else []
    for unit in units:
        for name in unit.layers:
            free.pop(name, None)
    units += [graph.unit((name,), [node], node) for name, node in free.items()]
    units.sort(key=lambda unit: graph.order[unit.output])
    return units, {name: why for name, why in reasons.items() if why}


def chosen(reasons: Mapping[str, str], layers: Sequence[str] | None, what: str) -> list[str]:
    """Return the layers to process: the named ones, or all without an obstacle. Errors begin with `what`.

    Raises TypeError: one string was given; ValueError: a name is unknown, or its layer has an obstacle; or no layer is left.
    """
    possible = [name for name, why in reasons.items() if not why]
    if isinstance(layers, str):
        raise TypeError(f"{what}: layers must be a sequence of names, got the string {layers!r}; write [{layers!r}].")
    for name in layers or ():
        check_known(f"layer of {what}", name, reasons)
        if reasons[name]:
            near = f"supported layers are {', '.join(possible[:3])}" if possible else "no layer here is supported"
            raise ValueError(
                f"{what}: layer {name!r} is not supported: {reasons[name]}. Remove it from layers; {near}."
            )
    if not possible:
        why = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:3]) or "there is no layer"
        raise ValueError(f"{what}: the model has no layer with a weight that can be rounded ({why}).")
    return possible if layers is None else list(dict.fromkeys(layers))


def obstacles(model: nn.Module) -> dict[str, str]:
    """Return for each layer with a quantized weight why its rounding cannot be chosen, by its first name; "" if it can.

    Convolutions and linear layers in float are included.
    """
    names = names_by_module(model)
    owners = owners_of_parameters(model)
    for node in model.graph.nodes if isinstance(model, QuantizedGraphModule) else ():
        if node.op == "get_attr":
            owners.setdefault(id(operator.attrgetter(node.target)(model)), []).extend(_readers(node))
    return {
        aliases[0]: _obstacle(layer, aliases[0], owners)
        for layer, aliases in names.items()
        if kind_of_module(layer).layer or (isinstance(layer, QuantModule) and layer.weight_quantizers())
    }


def obstacles_of_functions(model: nn.Module) -> dict[str, str]:
    """Return why functions with a quantized weight are skipped, by the names of their nodes."""
    nodes = model.graph.nodes if isinstance(model, QuantizedGraphModule) else ()
    functions = [function for node in nodes if is_weight_quantizer(node) for function in node.users]
    return dict.fromkeys(
        [function.name for function in functions],
        "it is a function with a weight argument; use a layer, which owns its weight",
    )


def _readers(node: fx.Node) -> list[str]:
    """Return the functions with a parameter as an argument, with or without a quantizer between."""
    return [reader.name for user in node.users for reader in (user.users if is_weight_quantizer(user) else (user,))]


def _obstacle(layer: nn.Module, name: str, owners: Mapping[int, Sequence[str]]) -> str:
    kind = kind_of_module(layer)
    if not kind.layer:
        return f"it is of kind {kind.name!r}; only convolutions (transposed too) and linear layers are supported"
    quantizer = layer.weight_quantizer if isinstance(layer, QuantWeighted) else None
    if not isinstance(layer, QuantWeighted) or not isinstance(quantizer, TensorQuantizer) or not quantizer.quantizing:
        return "its weight is not quantized; give it a config in the QConfigMapping"
    if not quantizer.capability.plain:
        return f"its weight is quantized as {quantizer.spec.describe()}, which is not a plain integer grid"
    if "weight" not in layer._parameters:
        return "its weight is computed from other tensors (pruned or parametrized); make it plain with torch.nn.utils first"
    others = [owner for owner in owners[id(layer.weight)] if owner != name]
    return f"it shares its weight with {others[0]!r}" if others else ""


class _GraphOfUnits:
    """A graph with lookup tables for finding units."""

    def __init__(self, gm: QuantizedGraphModule) -> None:
        self.gm, self.free = gm, free_nodes(gm)
        self.nodes = [node for node in gm.graph.nodes if node not in self.free]
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.calls = ModuleCalls(gm.graph)

    def unit(self, layers: Sequence[str], inside: Iterable[fx.Node], output: fx.Node) -> RoundingUnit:
        """Return the unit of some nodes, with the activation after them and the quantizers before them."""
        members = set(inside)
        while (follower := self._follower(output, members)) is not None:
            members.add(follower)
            output = follower
        self._take_quantizers(members)
        nodes = sorted(members, key=self.order.__getitem__)
        inputs = {s: None for node in nodes for s in node.all_input_nodes if s not in members and s not in self.free}
        ordered = sorted(inputs, key=self.order.__getitem__)
        return RoundingUnit(_name(layers), tuple(layers), tuple(nodes), tuple(ordered), output)

    def _follower(self, output: fx.Node, members: set[fx.Node]) -> fx.Node | None:
        """Return the batch norm or activation that is the only user of an output, and has no other input."""
        users = list(output.users)
        if len(users) != 1 or users[0] in members or users[0] not in self.order:
            return None
        kind, others = kind_of(users[0]), set(users[0].all_input_nodes) - {output} - self.free
        return users[0] if (kind.activation or kind.normalizes_batches) and not others else None

    def _take_quantizers(self, members: set[fx.Node]) -> None:
        """Add the quantizers of the inputs that only these nodes use, with the ops between."""
        for source in [source for node in list(members) for source in node.all_input_nodes]:
            path: list[fx.Node] = []
            node: fx.Node | None = source
            while node is not None and node in self.order and node not in members:
                if not {*members, *path}.issuperset(node.users):
                    break
                path.append(node)
                if is_quantizer(node):
                    members.update(path)
                moves = kind_of(node).moves and len(node.all_input_nodes) == 1
                node = node.all_input_nodes[0] if moves else None


def _name(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    parts = [name.split(".")[:-1] for name in layers]
    shared = [atoms[0] for atoms in zip(*parts, strict=False) if len(set(atoms)) == 1]
    return ".".join(shared) or f"{layers[0]} to {layers[-1]}"


# ---- blocks


def _blocks(graph: _GraphOfUnits, layers: Mapping[str, fx.Node]) -> list[RoundingUnit]:
    taken: set[str] = set()
    units: list[RoundingUnit] = []
    for inside, output in (*_branching(graph), *_modules(graph)):
        names = [str(node.target) for node in inside if node in layers.values()]
        if len(names) > 1 and taken.isdisjoint(names):
            taken.update(names)
            units.append(graph.unit(names, inside, output))
    return units


def _branching(graph: _GraphOfUnits) -> list[tuple[list[fx.Node], fx.Node]]:
    """Return the sections of the graph between points with a single tensor, with their outputs."""
    after_layer: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_layer(node) or not after_layer.isdisjoint(node.all_input_nodes):
            after_layer.add(node)
    live: dict[fx.Node, int] = {}
    stretches: list[tuple[list[fx.Node], fx.Node]] = []
    inside: list[fx.Node] = []
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source in live:
                live[source] -= 1
                if not live[source]:
                    del live[source]
        if node in after_layer and node.op != "output":
            inside.append(node)
            if node.users:
                live[node] = len(node.users)
        if len(live) == 1 and inside:
            stretches.append((inside, next(iter(live))))
            inside = []
    few = [(nodes, output) for nodes, output in stretches if sum(map(_is_layer, nodes)) <= MOST_IN_REGION]
    return [(nodes, output) for nodes, output in few if output in nodes]


def _modules(graph: _GraphOfUnits) -> list[tuple[list[fx.Node], fx.Node]]:
    """Return the nodes and the output of each submodule with few layers and one output, largest number of layers first."""
    calls = graph.gm.calls
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        call = facts_of(node).call
        for around in ancestors(calls, call) if call is not None and calls else ():
            members.setdefault(around, []).append(node)
    found: list[tuple[list[fx.Node], fx.Node]] = []
    for call, nodes in members.items():
        inside = set(nodes)
        for node in nodes:  # with the quantizers between them
            inside.update(user for user in node.users if is_quantizer(user) and inside.issuperset(user.users))
        outputs = [node for node in inside if not inside.issuperset(node.users)]
        if call != ROOT and len(outputs) == 1 and sum(map(_is_layer, nodes)) <= MOST_IN_MODULE:
            found.append((sorted(inside, key=graph.order.__getitem__), outputs[0]))
    return sorted(found, key=lambda each: -sum(map(_is_layer, each[0])))


def _is_layer(node: fx.Node) -> bool:
    module = called_module(node)
    return isinstance(module, QuantWeighted) and module.OP_KIND.layer
