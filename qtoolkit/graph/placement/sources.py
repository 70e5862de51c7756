"""The quantizers of the inputs of layers in training."""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.module_calls import ModuleCalls, calls_of_layer
from qtoolkit.graph.nodes import is_weight_quantizer, operands_of
from qtoolkit.graph.placement.traversal import modules_behind, quantizer_behind, source_of
from qtoolkit.nn import QuantMultiheadAttention
from qtoolkit.nn.batch_norm import LinkedBatchNorm
from qtoolkit.nn.layer_call import Source
from qtoolkit.nn.on_codes import TakesCodes
from qtoolkit.nn.wrappers import warn_of_adapter
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.wrapped import unwrapped


def link_sources(graph: fx.Graph, backend: Backend) -> None:
    """Tell each layer that a graph calls the quantizer of its input, for each `LayerCall`.

    An attention gets the sources of query, key and value: one object where these are one tensor in each call.

    It is None where it is unknown, and where the nodes of one `LayerCall` have several. A prepared model does so whenever its
    graph is compiled: the graph may have been changed. A layer that something else has come to call, such as an adapter around
    it, may get any values.
    """
    calls_of = ModuleCalls(graph)
    for attention, nodes in calls_of.of_type(QuantMultiheadAttention).items():
        inputs = list(zip(*map(operands_of, nodes), strict=True))
        found = {tensors: _common_source(tensors, backend) for tensors in dict.fromkeys(inputs)}
        attention.sources = [found[tensors] for tensors in inputs]
    for layer, nodes in calls_of.of_layers().items():
        calls = [(call, [source_of(node) for node in of_call]) for call, of_call in calls_of_layer(layer, nodes)]
        layer.layer_calls = tuple(replace(call, source=_common_source(tensors, backend)) for call, tensors in calls)
    called: set[object] = {unwrapped(module) for module in calls_of.of_type(nn.Module)}
    for module in linked_in(graph.owning_module):
        if module not in called:
            module.unlink()


def warn_of_adapters(graph: fx.Graph) -> None:
    """Warn of each module that is called in a layer's place, and may change its output before the layer's batch norm."""
    for follower in (node for node in graph.nodes if node.op == "call_module"):
        bn, before = module_of(follower), source_of(follower)
        if isinstance(bn, LinkedBatchNorm) and before is not None and before.op == "call_module":
            warn_of_adapter(str(before.target), module_of(before), str(follower.target), bn)


def linked_in(model: nn.Module | None) -> list[TakesCodes]:
    """Return the modules in a model that its graph has linked, without modules of other graphs in it."""
    seen: dict[nn.Module, None] = {}
    waiting = [] if model is None else [model]
    while waiting:
        module = waiting.pop()
        children = [child for child in module.children() if child not in seen and not isinstance(child, fx.GraphModule)]
        seen.update(dict.fromkeys(children))
        waiting += children
    return [module for module in seen if isinstance(module, TakesCodes) and any(module.input_sources())]


def quantizers_at(sources: Sequence[Source | None]) -> set[Quantizer | None]:
    """Return the quantizers of some sources; with None, if a source is not known."""
    return {None if source is None else source.quantizer for source in sources}


def _common_source(tensors: Sequence[fx.Node | None], backend: Backend) -> Source | None:
    """Return the source of the tensors in training; None where they have several."""
    sources = [_source_behind(tensor, backend, in_training=True) for tensor in tensors]
    first = sources[0] if len(quantizers_at(sources)) == 1 else None
    found = [tensor for tensor in tensors if tensor is not None]
    return None if first is None else replace(first, between=modules_behind(found, backend))


def source_in_training(node: fx.Node, backend: Backend) -> Source | None:
    """Return the source of a tensor in training; None where no quantizer, or a weight's, computes it."""
    behind = quantizer_behind(node, backend, in_training=True)
    source = None if behind is None or is_weight_quantizer(behind) else _source_at(behind)
    return None if source is None else replace(source, between=modules_behind([node], backend))


def source_of_input(node: fx.Node, backend: Backend) -> Source | None:
    """Return the source of the first tensor that an op takes, or None."""
    return _source_behind(source_of(node), backend)


def _source_behind(tensor: fx.Node | None, backend: Backend, in_training: bool = False) -> Source | None:
    behind = None if tensor is None else quantizer_behind(tensor, backend, in_training)
    return None if behind is None else _source_at(behind)


def _source_at(node: fx.Node) -> Source | None:
    """Return the source of a node's result; None unless it calls a quantizer."""
    if not isinstance(module_of(node), Quantizer) or node.graph.owning_module is None:
        return None
    parent, _, name = str(node.target).rpartition(".")
    return Source(node.graph.owning_module.get_submodule(parent), name)
