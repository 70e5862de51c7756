"""The calls of modules in a graph. A change of a module applies to all of its calls."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from torch import fx, nn

from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.layer_call import LayerCall
from qtoolkit.op_kinds.rules import is_number, module_of

NUMBER = "call"  # the argument of a layer's forward that is the number of the call

M = TypeVar("M", bound=nn.Module)


class ModuleCalls:
    """The nodes of a graph that call each of its modules."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes: dict[nn.Module, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_module":
                self._nodes[module_of(node)].append(node)

    def of(self, module: nn.Module) -> list[fx.Node]:
        """Return the calls of a module, in the order in which they run."""
        return self._nodes.get(module, [])

    def is_only_one(self, node: fx.Node) -> bool:
        """Return whether no other node calls the module of this one; True for a function."""
        return node.op != "call_module" or len(self.of(module_of(node))) == 1

    def of_layers(self) -> dict[QuantWeighted, list[fx.Node]]:
        """Return the calls of each layer whose input other nodes quantize."""
        return {layer: nodes for layer, nodes in self.of_type(QuantWeighted).items() if layer.input_quantizer is None}

    def of_type(self, kind: type[M]) -> dict[M, list[fx.Node]]:
        """Return the calls of each module of a type."""
        return {module: nodes for module, nodes in self._nodes.items() if isinstance(module, kind)}


def why_read(graph: fx.Graph, layer: nn.Module, bn: nn.Module) -> str | None:
    """Return why a batch norm stays that a layer would take over, where other ops read a tensor of one of the two; else None.

    Folding replaces the layer's tensors (their dtypes stay) and removes the batch norm.
    """
    lost, changed = ({id(t) for t in (*m.parameters(), *m.buffers())} for m in (bn, layer))
    for node in graph.find_nodes(op="get_attr"):
        tensor = id(attrgetter(str(node.target))(graph.owning_module))
        if tensor in lost or (tensor in changed and not all(map(is_number, node.users))):
            return f"{next(iter(node.users), node).name!r} reads {str(node.target)!r}, which folding would change"
    return None


def number_calls(layer: QuantWeighted, nodes: Sequence[fx.Node]) -> bool:
    """Give each call of a layer a number and a `LayerCall`; return False for a layer with a forward of its own.

    A forward of its own takes no number. Calls that are numbered keep their links.
    """
    if [number_of(node) for node in nodes] == list(range(len(nodes))):
        return True
    if type(layer).forward is not QuantWeighted.forward:
        return False
    layer.layer_calls = tuple(replace(layer.layer_calls[0], number=number) for number in range(len(nodes)))
    for number, node in enumerate(nodes):
        others = {name: value for name, value in node.kwargs.items() if name != NUMBER}
        node.kwargs = {**others, **numbered(number)}
    return True


def number_of(node: fx.Node) -> int:
    """Return the number of the call of a layer that a node makes."""
    number = node.kwargs.get(NUMBER, 0)
    return number if isinstance(number, int) else 0


def numbered(call: int) -> dict[str, int]:
    """Return the arguments of a layer's forward that say which of its calls this is: none for the first."""
    return {NUMBER: call} if call else {}


def calls_of_layer(layer: QuantWeighted, nodes: Sequence[fx.Node]) -> list[tuple[LayerCall, list[fx.Node]]]:
    """Return each `LayerCall` of a layer with its nodes: one that has a number, or all of them where none has."""
    return [(call, [node for node in nodes if number_of(node) == call.number]) for call in layer.layer_calls]


def call_of_layer(layer: QuantWeighted, node: fx.Node) -> LayerCall:
    """Return the `LayerCall` of a node of a layer."""
    return layer.layer_calls[number_of(node)]
