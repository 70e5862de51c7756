"""Link layers, and functions with a weight, to the quantizers of their inputs, on whose grids they compute."""

from collections.abc import Sequence

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls, number_calls
from qtoolkit.graph.passes.insert import add_holder, free_name
from qtoolkit.graph.placement.sources import quantizer_of_input
from qtoolkit.graph.weighted_functions import bias_node, layer_of, rounding_of
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.function_bias import FunctionBias
from qtoolkit.nn.on_codes import Source

HOLDER = "bias_quantizers"  # the submodule of a prepared model that rounds the biases of functions


def run(gm: QuantizedGraphModule, backend: Backend) -> QuantizedGraphModule:
    """Link each layer to the quantizer of its input: a node of the graph, or one of the layer's own.

    A layer that is called on tensors of several quantizers is linked to all of them, and its calls are numbered. Where the
    target adds biases to integer sums, the bias of a function gets a node of its own, which rounds it.
    """
    link_own_inputs(gm, backend)
    numbered = [_link_calls(layer, nodes, backend) for layer, nodes in ModuleCalls(gm.graph).of_layers().items()]
    if any(numbered):
        gm.recompile()
    gm.link_sources()
    if backend.integer_bias:
        _link_functions(gm, backend)
    return gm


def _link_calls(layer: QuantWeighted, nodes: Sequence[fx.Node], backend: Backend) -> bool:
    """Link a layer to the quantizers of its calls' inputs; return whether the calls are numbered, because they have several."""
    quantizers = [quantizer_of_input(node, backend) for node in nodes]
    several = len(set(quantizers)) > 1
    numbered = several and number_calls(layer, nodes)
    if backend.integer_bias:
        layer.link_input(*(quantizers if numbered else () if several else quantizers[:1]))
    return numbered


def link_own_inputs(model: nn.Module, backend: Backend) -> None:
    """Link each layer that quantizes its own input to that quantizer."""
    for layer in model.modules():
        if isinstance(layer, QuantWeighted):
            layer.link_source(None if layer.input_quantizer is None else Source(layer.input_quantizer))
            layer.link_input(layer.input_quantizer if backend.integer_bias else None)


def _link_functions(gm: QuantizedGraphModule, backend: Backend) -> None:
    holder = ""
    for node in list(gm.graph.nodes):
        bias, source = bias_node(node), quantizer_of_input(node, backend)
        layer = None if bias is None or source is None else layer_of(gm, node)
        if bias is None or layer is None:
            continue
        layer.link_input(source)
        rounding = rounding_of(bias)
        if rounding is not None:
            rounding.link(layer)
        elif layer.scales_along_outputs():
            holder = holder or add_holder(gm, HOLDER)
            _insert_bias(gm, node, bias, f"{holder}.{free_name(gm.get_submodule(holder), node.name)}", layer)
    if holder:
        gm.graph.lint()
        gm.recompile()


def layers_of_functions(gm: QuantizedGraphModule) -> list[tuple[str, QuantWeighted]]:
    """Return the layer of each function whose bias is rounded, with the function's name."""
    roundings = [(node, rounding_of(bias_node(node))) for node in gm.graph.nodes]
    return [(node.name, rounding.layer) for node, rounding in roundings if rounding is not None]


def _insert_bias(gm: QuantizedGraphModule, node: fx.Node, bias: fx.Node, target: str, layer: QuantWeighted) -> None:
    gm.add_submodule(target, FunctionBias(layer))
    with gm.graph.inserting_before(node):
        on_grid = gm.graph.call_module(target, (bias,))
    node.replace_input_with(bias, on_grid)
