"""The calls of modules in a graph. What a pass changes in a module, it changes for all of its calls."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from torch import fx, nn

from qtoolkit.nn import QuantWeighted
from qtoolkit.op_kinds.rules import module_of

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


def number_calls(layer: QuantWeighted, nodes: Sequence[fx.Node]) -> bool:
    """Tell each call of a layer its number; return False for a layer with a forward of its own, which takes none."""
    takes_number = type(layer).forward is QuantWeighted.forward
    for number, node in enumerate(nodes[1:] if takes_number else (), start=1):
        node.kwargs = {**node.kwargs, "call": number}
    return takes_number


def number_of(node: fx.Node) -> int:
    """Return the number of a call of a layer."""
    number = node.kwargs.get("call", 0)
    return number if isinstance(number, int) else 0
