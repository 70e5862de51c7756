"""The quantizers on whose grids the inputs of layers lie in training."""

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.graph.nodes import is_weight_quantizer, tensor_inputs
from qtoolkit.graph.placement.traversal import dropouts_behind, quantizer_behind
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.on_codes import Source
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer


def link_sources(graph: fx.Graph, backend: Backend) -> None:
    """Tell each layer that a graph calls the quantizer of its input: of each call's, if the calls are numbered.

    It is None where it is unknown, or where calls without numbers have several. A prepared model does so whenever its graph is
    compiled: the graph may have been changed.
    """
    for layer, nodes in layer_calls(graph).items():
        numbers = [number_of(node) for node in nodes]
        calls = [[node] for node in nodes] if numbers == list(range(len(nodes))) else [nodes]
        layer.link_source(*(_source_of_calls(call, backend) for call in calls))


def _source_of_calls(nodes: Sequence[fx.Node], backend: Backend) -> Source | None:
    quantizers = {quantizer_of_input(node, backend, in_training=True) for node in nodes}
    quantizer = quantizers.pop() if len(quantizers) == 1 else None
    inputs = [source for node in nodes for source in tensor_inputs(node)[:1]]
    return None if quantizer is None else Source(quantizer, dropouts_behind(inputs, backend))


def source_in_training(node: fx.Node, backend: Backend) -> Source | None:
    """Return the source of a tensor in training; None where its values are on no quantizer's grid, or on that of a weight."""
    behind = quantizer_behind(node, backend, in_training=True)
    quantizer = None if behind is None or is_weight_quantizer(behind) else module_of(behind)
    return Source(quantizer, dropouts_behind([node], backend)) if isinstance(quantizer, Quantizer) else None


def layer_calls(graph: fx.Graph) -> dict[QuantWeighted, list[fx.Node]]:
    """Return the calls of each layer whose input other nodes quantize."""
    calls: dict[QuantWeighted, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        layer = module_of(node) if node.op == "call_module" else None
        if isinstance(layer, QuantWeighted) and layer.input_quantizer is None:
            calls[layer].append(node)
    return calls


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


def quantizer_of_input(node: fx.Node, backend: Backend, in_training: bool = False) -> Quantizer | None:
    """Return the quantizer of the first tensor that an op takes, or None."""
    inputs = tensor_inputs(node)
    behind = quantizer_behind(inputs[0], backend, in_training) if inputs else None
    quantizer = None if behind is None else module_of(behind)
    return quantizer if isinstance(quantizer, Quantizer) else None
