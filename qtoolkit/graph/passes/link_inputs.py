"""Link layers, and functions with a weight, to the quantizers of their inputs, on whose grids they compute."""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls, calls_of_layer, number_calls
from qtoolkit.graph.passes.insert import add_holder, free_name
from qtoolkit.graph.placement.sources import quantizers_at, source_of_input
from qtoolkit.graph.weighted_functions import bias_node, layer_of, rounding_of
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.function_bias import FunctionBias
from qtoolkit.nn.layer_call import LayerCall, Source

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
    numbered = len(quantizers_at(_sources_of(nodes, backend))) > 1 and number_calls(layer, nodes)
    if backend.integer_bias:
        layer.layer_calls = tuple(_linked(call, of_call, backend) for call, of_call in calls_of_layer(layer, nodes))
    return numbered


def _sources_of(nodes: Sequence[fx.Node], backend: Backend) -> list[Source | None]:
    return [source_of_input(node, backend) for node in nodes]


def _linked(call: LayerCall, nodes: Sequence[fx.Node], backend: Backend) -> LayerCall:
    """Return a call whose bias is added to integer sums over its nodes' inputs; in float, if these have several grids."""
    sources = _sources_of(nodes, backend)
    one_grid = len(quantizers_at(sources)) == 1
    return replace(call, integer_bias=one_grid, sums_over=sources[0] if one_grid else None)


def link_own_inputs(model: nn.Module, backend: Backend) -> None:
    """Tell each layer whether the target adds the bias to integer sums over an input that it quantizes itself."""
    for layer in model.modules():
        if isinstance(layer, QuantWeighted):
            changed = (replace(call, integer_bias=backend.integer_bias, sums_over=None) for call in layer.layer_calls)
            layer.layer_calls = tuple(changed)


def _link_functions(gm: QuantizedGraphModule, backend: Backend) -> None:
    holder = ""
    for node in list(gm.graph.nodes):
        bias = bias_node(node)
        source = None if bias is None else source_of_input(node, backend)
        layer = None if source is None else layer_of(gm, node)
        if bias is None or layer is None:
            continue
        layer.layer_calls = (LayerCall(integer_bias=True, sums_over=source),)
        rounding = rounding_of(bias)
        if rounding is not None:
            rounding.link(layer)
        elif layer.scales_along_outputs():
            holder = holder or add_holder(gm, HOLDER)
            target = f"{holder}.{free_name(gm.get_submodule(holder), node.name)}"
            gm.add_submodule(target, FunctionBias(layer))
            with gm.graph.inserting_before(node):
                on_grid = gm.graph.call_module(target, (bias,))
            node.replace_input_with(bias, on_grid)
    if holder:
        gm.graph.lint()
        gm.recompile()


def layers_of_functions(gm: QuantizedGraphModule) -> list[tuple[str, QuantWeighted]]:
    """Return the layer of each function whose bias is rounded, with the function's name."""
    roundings = [(node, rounding_of(bias_node(node))) for node in gm.graph.nodes]
    return [(node.name, rounding.layer) for node, rounding in roundings if rounding is not None]
