"""The ops of a torch.fx graph as placement rules read them."""

from collections.abc import Callable

from torch import fx, nn

from qtoolkit.graph.nodes import (
    has_float_weight,
    is_quantizer,
    is_weight_quantizer,
    kind_of,
    name_of,
    owns_weight,
    parameters_in,
    tensor_inputs,
    users_of,
)
from qtoolkit.lint.ops import LayerFacts, Op, WeightFacts
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.rules import CASTS, argument, module_of
from qtoolkit.quantizers.quantizer import Quantizer


def ops_of(graph: fx.Graph, weight_of: Callable[[fx.Node], WeightFacts | None] = lambda node: None) -> list[Op]:
    """Return the ops of a graph in order.

    `weight_of` returns how the weight of a function will be quantized; it is asked where no quantizer stands before it.
    """
    ops: dict[fx.Node, Op] = {}
    parameters = parameters_in(graph)
    for place, node in enumerate(graph.nodes):
        quantizer, is_cast = is_quantizer(node), node.op == "call_method" and node.target in CASTS
        sources = node.all_input_nodes[:1] if quantizer or is_cast else tensor_inputs(node)
        ops[node] = Op(
            name_of(node),
            kind_of(node),
            [ops[source] for source in sources],
            grid=str(node.target) if quantizer else None,
            of_weight=is_weight_quantizer(node),
            is_cast=is_cast,
            place=place,
            layer=_layer(node, parameters, weight_of),
            node=node,
        )
    for node, op in ops.items():
        op.users = [ops[user] for user in users_of(node)]
    return list(ops.values())


def _layer(
    node: fx.Node, parameters: set[fx.Node], weight_of: Callable[[fx.Node], WeightFacts | None]
) -> LayerFacts | None:
    """Return the facts about a layer, or about a function that takes a weight."""
    if owns_weight(node):
        return _layer_of_module(module_of(node), None if has_float_weight(node) else _weight_grid(node))
    weights = [source for source in node.all_input_nodes if is_weight_quantizer(source)]
    if not weights and (not kind_of(node).weight_argument or parameters.isdisjoint(tensor_inputs(node))):
        return None
    return LayerFacts(_weight_grid(weights[0]) if weights else weight_of(node), groups=argument(node, 6, "groups", 1))


def _layer_of_module(module: nn.Module, weight: WeightFacts | None) -> LayerFacts:
    own = getattr(module, "weight", None)
    sizes = () if own is None else tuple(own.shape)
    groups = getattr(module, "groups", 1)
    if isinstance(module, nn.modules.conv._ConvNd):  # of all convolutions, transposed ones too; torch has no public one
        return LayerFacts(weight, module.in_channels, module.out_channels, groups, tuple(module.kernel_size))
    return LayerFacts(weight, sizes[1], sizes[0], groups) if len(sizes) == 2 else LayerFacts(weight, groups=groups)


def _weight_grid(node: fx.Node) -> WeightFacts | None:
    module = module_of(node)
    quantizers = module.weight_quantizers().values() if isinstance(module, QuantModule) else [module]
    specs = [quantizer.spec for quantizer in quantizers if isinstance(quantizer, Quantizer)]
    return WeightFacts(specs[0].bits, specs[0].axis, specs[0].group_size is not None) if specs else None
