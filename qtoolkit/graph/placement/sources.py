"""The quantizers on whose grids the inputs of layers lie in training."""

from collections.abc import Sequence
from dataclasses import replace

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
    sources = [source_of_input(node, backend, in_training=True) for node in nodes]
    quantizers = {None if source is None else source.quantizer for source in sources}
    inputs = [source for node in nodes for source in tensor_inputs(node)[:1]]
    first = sources[0] if len(quantizers) == 1 else None
    return None if first is None else replace(first, dropouts=dropouts_behind(inputs, backend))


def source_in_training(node: fx.Node, backend: Backend) -> Source | None:
    """Return the source of a tensor in training; None where its values are on no quantizer's grid, or on that of a weight."""
    behind = quantizer_behind(node, backend, in_training=True)
    source = None if behind is None or is_weight_quantizer(behind) else _source_at(behind)
    return None if source is None else replace(source, dropouts=dropouts_behind([node], backend))


def source_of_input(node: fx.Node, backend: Backend, in_training: bool = False) -> Source | None:
    """Return the source of the first tensor that an op takes, or None."""
    inputs = tensor_inputs(node)
    behind = quantizer_behind(inputs[0], backend, in_training) if inputs else None
    return None if behind is None else _source_at(behind)


def _source_at(node: fx.Node) -> Source | None:
    """Return the source of what a node returns; None unless it calls a quantizer."""
    if not isinstance(module_of(node), Quantizer) or node.graph.owning_module is None:
        return None
    parent, _, name = str(node.target).rpartition(".")
    return Source(node.graph.owning_module.get_submodule(parent), name)
