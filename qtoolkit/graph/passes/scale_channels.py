"""Make batch norms that no layer takes over depthwise convolutions, on targets with integer kernels for these alone."""

import torch
from torch import fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls, why_read
from qtoolkit.graph.nodes import is_output, kind_of, readers_of, tensor_inputs
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import QAT_MODULES, QuantWeighted
from qtoolkit.nn.batch_norm import factor_of, folded_bias
from qtoolkit.nn.hooks import has_hooks
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.rules import called_module

CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}  # by the dimensions of the input
DIMENSIONS: dict[object, int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}  # of types whose input has no others


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Replace each batch norm after a layer and its activation, in eval mode (`Backend.batch_norm_as_conv`).

    It keeps its name. The weight has the target's own spec, with a scale for each channel: so each factor is on its grid.
    """
    spec = rules.backend.qconfig.weight
    if gm.training or spec is None or not rules.backend.batch_norm_as_conv:
        return gm
    for bn, nodes in ModuleCalls(gm.graph).of_type(nn.Module).items():
        found = {_convolution(node, rules) for node in nodes} if kind_of(nodes[0]).normalizes_batches else {None}
        if len(found) > 1 or None in found or has_hooks(bn) or bn._modules or why_read(gm.graph, bn, bn):
            continue
        ((kind, dtype),) = filter(None, found)
        conv = _scaling(bn, kind, dtype)
        name = str(nodes[0].target)
        gm.set_submodule(name, QAT_MODULES[kind].from_float(conv, spec.with_(axis=0), name))
    gm.recompile()
    return gm


def _convolution(node: fx.Node, rules: LayerRules) -> tuple[type[nn.Module], torch.dtype] | None:
    """Return the type of the convolution that computes a call of a batch norm, with its dtype; None where none does."""
    bn, before = called_module(node), tensor_inputs(node)[0]
    while kind_of(before).activation and len(tensor_inputs(before)) == 1:
        before = tensor_inputs(before)[0]
    layer, qconfig = called_module(before), rule_of_node(node, rules).qconfig
    if not isinstance(layer, QuantWeighted) or not kind_of(before).layer or all(map(is_output, readers_of(node))):
        return None
    if qconfig is None or qconfig.activation is None or qconfig.weight is None:
        return None
    dims = facts_of(node).input_dims or DIMENSIONS.get(type(bn), 0)
    if dims not in CONVOLUTIONS or getattr(bn, "running_mean", None) is None:
        return None
    return CONVOLUTIONS[dims], layer.weight.dtype


def _scaling(bn: nn.Module, kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return the depthwise convolution that a batch norm is in eval mode."""
    factor = factor_of(bn).detach()
    shift, channels = folded_bias(bn, None, factor).detach(), factor.numel()
    conv = kind(channels, channels, 1, groups=channels, device="meta").train(bn.training)
    conv.weight = nn.Parameter(factor.reshape(conv.get_parameter("weight").shape).to(dtype))
    conv.bias = nn.Parameter(shift.to(dtype))
    return conv
