"""Link layers to the quantizers of their inputs, on whose grids they compute."""

from collections import defaultdict
from collections.abc import Sequence

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.placement.traversal import quantizer_behind
from qtoolkit.nn import QuantWeighted
from qtoolkit.op_kinds.nodes import module_of, tensor_inputs
from qtoolkit.quantizers.quantizer import Quantizer


def run(gm: QuantizedGraphModule, backend: Backend) -> QuantizedGraphModule:
    """Link each layer to the quantizer of its input: a node of the graph, or one of the layer's own.

    A layer that is called on tensors of several quantizers has several grids, and is not linked.
    """
    link_own_inputs(gm, backend)
    calls: dict[QuantWeighted, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        layer = module_of(node) if node.op == "call_module" else None
        if isinstance(layer, QuantWeighted) and layer.input_quantizer is None:
            calls[layer].append(node)
    for layer, nodes in calls.items():
        layer.link_source(_quantizer_of_inputs(nodes, backend, in_training=True))
        if backend.integer_bias:
            layer.link_input(_quantizer_of_inputs(nodes, backend))
    return gm


def link_own_inputs(model: nn.Module, backend: Backend) -> None:
    """Link each layer that quantizes its own input to that quantizer."""
    for layer in model.modules():
        if isinstance(layer, QuantWeighted):
            layer.link_source(layer.input_quantizer)
            layer.link_input(layer.input_quantizer if backend.integer_bias else None)


def _quantizer_of_inputs(nodes: Sequence[fx.Node], backend: Backend, in_training: bool = False) -> Quantizer | None:
    """Return the one quantizer of the inputs of all calls of a layer, or None."""
    found = {_quantizer_of_input(node, backend, in_training) for node in nodes}
    return found.pop() if len(found) == 1 else None


def _quantizer_of_input(node: fx.Node, backend: Backend, in_training: bool) -> Quantizer | None:
    inputs = tensor_inputs(node)
    behind = quantizer_behind(inputs[0], backend, in_training) if inputs else None
    quantizer = None if behind is None else module_of(behind)
    return quantizer if isinstance(quantizer, Quantizer) else None
