"""The rule that holds for a node of a graph: that of the one resolver, or one of the target's."""

from dataclasses import replace

from torch import fx

from qtoolkit.graph.nodes import name_of, object_type_of
from qtoolkit.graph.placement.first_last import with_least_bits
from qtoolkit.graph.placement.returned import left_as_returned
from qtoolkit.layer_rules import LayerRules, Rule


def rule_of_node(node: fx.Node, rules: LayerRules) -> Rule:
    """Return the rule for a node. A rule of the target may leave a layer in float that no explicit rule names.

    Raises ValueError: its module has several names, and the mapping has different configs for them.
    """
    is_module, backend = node.op == "call_module", rules.backend
    names = rules.names_of(name_of(node)) if is_module else (node.name,)
    rule = rules.find(names, object_type_of(node), None if is_module else _scope_of(node))
    left = None if rule.is_explicit or rule.qconfig is None else left_as_returned(node, backend)
    if left is not None:
        return replace(rule, qconfig=None, left=left)
    if rule.is_general and backend.end_bits is not None:
        return replace(rule, qconfig=with_least_bits(node, rule.qconfig, backend.end_bits))
    return rule


def _scope_of(node: fx.Node) -> str:
    """Return the dotted name of the submodule whose forward calls a function or method, as torch.fx records it."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""
