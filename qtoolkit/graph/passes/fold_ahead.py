"""Fold batch norms without a layer before them into the layers that take their outputs, in eval mode, where that is exact.

In training mode such a batch norm is computed by torch, and stays an op: the layers quantize its output.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from torch import fx, nn

from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls, why_read
from qtoolkit.graph.nodes import is_quantizer, kind_of, readers_of, tensor_inputs
from qtoolkit.graph.passes.link_batch_norms import remove
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.computed_weights import computing_hooks
from qtoolkit.op_kinds.facts import facts_of, replace_node
from qtoolkit.op_kinds.rules import called_module, module_of
from qtoolkit.verdicts import Obstacle

Layers = dict[fx.Node, QuantWeighted]
"""The calls of layers that take the output of a batch norm."""


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Fold each batch norm that no layer has taken over into the layers that take its output, where they can take it."""
    if gm.training:
        return gm
    calls = ModuleCalls(gm.graph)
    for bn, nodes in calls.of_type(nn.Module).items():
        layers = _layers_ahead(nodes, calls, rules) if kind_of(nodes[0]).normalizes_batches else None
        if not isinstance(layers, dict):
            continue
        for layer in dict.fromkeys(layers.values()):
            layer.fold_batch_norm_before(bn)
            layer.reset_weight_range()
        name = str(nodes[0].target)
        for node in nodes:
            replace_node(node, node.all_input_nodes[0])
        remove(gm, name, bn)
    gm.recompile()
    return gm


def why_not_ahead(node: fx.Node, calls: ModuleCalls, rules: LayerRules) -> str:
    """Return why the layers that take the output of a batch norm do not take it over."""
    gm = node.graph.owning_module
    if gm is not None and gm.training:
        return "in training mode layers take over only a batch norm after them"
    found = _layers_ahead(calls.of(module_of(node)) if node.op == "call_module" else [node], calls, rules)
    return found.why if isinstance(found, Obstacle) else "it came in after the model was prepared"


def _layers_ahead(nodes: Sequence[fx.Node], calls: ModuleCalls, rules: LayerRules) -> Layers | Obstacle:
    """Return the layers that take the outputs of all calls of a batch norm, and nothing else; or why they are not all."""
    layers: Layers = {}
    for node in nodes:
        found = _taking(node, rules)
        if isinstance(found, Obstacle):
            return found
        layers |= found
    for layer in dict.fromkeys(layers.values()):
        if not layers.keys() >= set(calls.of(layer)):
            return Obstacle("a layer after it takes other tensors too")
    return layers


def _taking(node: fx.Node, rules: LayerRules) -> Layers | Obstacle:
    """Return the layers that take the output of a batch norm in one of its calls, or why one of its users is none."""
    bn, dims = called_module(node), facts_of(node).input_dims
    mean = getattr(bn, "running_mean", None)
    if kind_of(node.all_input_nodes[0]).layer:
        return Obstacle("a layer is right before it")
    if bn is None or mean is None or getattr(bn, "running_var", None) is None:
        return Obstacle("it is a function, or has no running statistics")
    if bn._forward_hooks or bn._forward_pre_hooks or rule_of_node(node, rules).qconfig is None:
        return Obstacle("it has hooks, or the qconfig_mapping leaves it in float")
    owner = cast("fx.GraphModule", node.graph.owning_module)
    layers: Layers = {}
    waiting = readers_of(node)
    if not waiting:
        return Obstacle("nothing takes its output")
    while waiting:
        user = waiting.pop()
        layer = called_module(user)
        if is_quantizer(user) or (kind_of(user).copies_channels and len(tensor_inputs(user)) == 1):
            waiting += readers_of(user)
        elif not isinstance(layer, QuantWeighted):
            return Obstacle(f"{user.name!r} takes its output, and is no quantized layer")
        elif not layer.takes_affine() or layer.input_channels() != mean.numel():
            return Obstacle(f"{user.name!r} takes its output, and pads it with zeros or mixes its channels")
        elif layer.why_batch_norm_stays() is not None:
            return Obstacle(f"{user.name!r} takes its output: {layer.why_batch_norm_stays()}")
        elif layer.input_quantizer is not None or len(layer._forward_pre_hooks) > len(computing_hooks(layer)):
            return Obstacle(
                f"{user.name!r} takes its output, and a leaf module calls it too, or a hook takes its input"
            )
        elif any(changed_by(between, owner) is not None for between in _between(node, user)):
            return Obstacle(f"an op before {user.name!r} changes a tensor in place")
        elif dims not in (None, layer.weight.dim()):
            return Obstacle(f"it normalizes dimension 1 of {dims}, which are not the input channels of {user.name!r}")
        elif (read := why_read(node.graph, layer, bn)) is not None:
            return Obstacle(read)
        else:
            layers[user] = layer
    return layers


def _between(node: fx.Node, user: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that run between two others."""
    while (node := node.next) is not user:
        yield node
