"""Write SiLU as x * sigmoid(x), on targets that compute a sigmoid and a product in integers, but no SiLU."""

import torch
from torch import fx

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import kind_of, tensor_inputs
from qtoolkit.graph.placement.roles import Roles
from qtoolkit.layer_rules import LayerRules
from qtoolkit.op_kinds.facts import facts_of, set_facts


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Split each SiLU that takes quantized values (`Backend.splits_silu`), unless a rule of the user's names it.

    After an op that returns floats, such as a linear layer, SiLU stays float.
    """
    if not rules.backend.splits_silu:
        return gm
    roles = Roles(gm.graph, rules)
    for node in list(gm.graph.nodes):
        if kind_of(node).has_sigmoid_gate and roles.rule(node).is_general and roles.is_behind_codes(node):
            split(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def split(node: fx.Node) -> None:
    """Split a SiLU; the product keeps its node, and so its name. Ops that take a tensor which it changed take its output."""
    (source,) = tensor_inputs(node)
    with node.graph.inserting_before(node):
        gate = node.graph.create_node("call_function", torch.sigmoid, (source,), name=f"{node.name}_sigmoid")
    set_facts(gate, call=facts_of(node).call)
    node.op, node.target, node.args, node.kwargs = "call_function", torch.mul, (source, gate), {}
