"""Link layers to the quantizers of their inputs, where the target adds biases to integer sums."""

from collections import defaultdict

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.placement.traversal import quantizer_behind
from qtoolkit.nn import QuantWeighted
from qtoolkit.op_kinds.nodes import module_of, tensor_inputs
from qtoolkit.quantizers.quantizer import Quantizer


def run(gm: QuantizedGraphModule, backend: Backend) -> QuantizedGraphModule:
    """Link each layer to the quantizer of its input: a node of the graph, or one of the layer's own.

    A layer that is called on tensors of several quantizers has several grids of sums, and is not linked.
    """
    if not backend.integer_bias:
        return gm
    link_own_inputs(gm, backend)
    found: dict[QuantWeighted, set[Quantizer | None]] = defaultdict(set)
    for node in gm.graph.nodes:
        layer = module_of(node) if node.op == "call_module" else None
        if isinstance(layer, QuantWeighted) and layer.input_quantizer is None:
            found[layer].add(_quantizer_of_input(node, backend))
    for layer, quantizers in found.items():
        layer.link_input(quantizers.pop() if len(quantizers) == 1 else None)
    return gm


def link_own_inputs(model: nn.Module, backend: Backend) -> None:
    """Link each layer that quantizes its own input to that quantizer."""
    for layer in model.modules() if backend.integer_bias else ():
        if isinstance(layer, QuantWeighted):
            layer.link_input(layer.input_quantizer)


def _quantizer_of_input(node: fx.Node, backend: Backend) -> Quantizer | None:
    inputs = tensor_inputs(node)
    behind = quantizer_behind(inputs[0], backend) if inputs else None
    quantizer = None if behind is None else module_of(behind)
    return quantizer if isinstance(quantizer, Quantizer) else None
