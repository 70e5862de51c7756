"""The quantizers on whose grids the inputs of layers lie in training."""

from collections.abc import Sequence

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.graph.module_calls import ModuleCalls, number_of
from qtoolkit.graph.nodes import is_weight_quantizer, tensor_inputs
from qtoolkit.graph.placement.traversal import dropouts_behind, quantizer_behind
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.on_codes import Source
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer


def link_sources(graph: fx.Graph, backend: Backend) -> None:
    """Tell each layer that a graph calls the quantizer of its input: of each call's, if the calls are numbered.

    So with each attention of a tensor to itself.

    It is None where it is unknown, or where calls without numbers have several. A prepared model does so whenever its graph is
    compiled: the graph may have been changed.
    """
    calls_of = ModuleCalls(graph)
    for attention, nodes in calls_of.of_type(QuantMultiheadAttention).items():
        of_itself = all(len(node.args) > 2 and len(set(node.args[:3])) == 1 for node in nodes)
        attention.link_source(_source_of_calls(nodes, backend) if of_itself else None)
    for layer, nodes in calls_of.of_layers().items():
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


def quantizer_of_input(node: fx.Node, backend: Backend, in_training: bool = False) -> Quantizer | None:
    """Return the quantizer of the first tensor that an op takes, or None."""
    inputs = tensor_inputs(node)
    behind = quantizer_behind(inputs[0], backend, in_training) if inputs else None
    quantizer = None if behind is None else module_of(behind)
    return quantizer if isinstance(quantizer, Quantizer) else None
