"""Recognize activations that are written out, such as x * relu6(x + 3) / 6: the graph then calls torch's own function.

The rows of the table that are recognized have the function as their pattern (`OpKind.recognized`). Ops are recognized by
what they compute on a set of numbers, so that it does not matter how they are written.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache

import torch
from torch import Tensor, fx

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import callable_of, is_discrete, kind_of
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.rules import called_module, is_number, name_called
from qtoolkit.op_kinds.table import KINDS, NO_OPS, calls_where

MOST_OPS = 12  # of one activation: GELU by tanh has nine
# Functions and methods of no kind, without prefixes and suffixes: of one tensor, and arithmetic.
BENDS = ("erf", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal")
PLAIN = ("rsub", "pow", "square", "neg", "negative")
ELEMENTWISE = calls_where(lambda kind: kind.elementwise)
TOLERANCE = 1e-5  # of what is compared, so that 0.79788456 may stand for the square root of 2 / pi


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Replace activations that are written out by calls of torch's functions; the last op keeps its node, and so its name.

    They stay as they are where a rule of the user's names one of the ops, or not all of them have the same rule.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    bending = {node for node in gm.graph.nodes if _may_belong(node) and _bends(node)}
    elementwise = bending.union(node for node in gm.graph.nodes if _may_belong(node) and _is_plain(node))
    for last in reversed(list(gm.graph.nodes)):
        found = _written_out(last, order, elementwise, bending) if last in elementwise else None
        if found is None or not _have_one_rule(found[0], rules):
            continue
        ops, source, function = found
        last.op, last.target, last.args = "call_function", getattr(function, "func", function), (source,)
        last.kwargs = dict(getattr(function, "keywords", {}))
        set_facts(last, assigns_in_place=False)
        for node in ops[1:]:  # later ops come first
            gm.graph.erase_node(node)
        elementwise.difference_update(ops)
    gm.graph.lint()
    gm.recompile()
    return gm


def _written_out(
    last: fx.Node, order: Mapping[fx.Node, int], elementwise: Set[fx.Node], bending: Set[fx.Node]
) -> tuple[list[fx.Node], fx.Node, Callable[..., Tensor]] | None:
    """Return the ops of an activation, from the last to the first, the tensor that they take, and its function."""
    ops = [last]
    while len(ops) < MOST_OPS and (sources := {source for op in ops for source in op.all_input_nodes}.difference(ops)):
        nearest = max(sources, key=order.__getitem__)
        if len(sources) == 1 and len(ops) > 1 and not bending.isdisjoint(ops) and nearest.op != "get_attr":
            function = None if is_discrete(nearest) else _function_of(ops, nearest)
            if function is not None:
                return ops, nearest, function
        if nearest not in elementwise or not set(ops).issuperset(nearest.users):
            return None
        ops.append(nearest)
    return None


def _may_belong(node: fx.Node) -> bool:
    return node.op not in NO_OPS and not is_number(node) and not facts_of(node).in_training


def _is_plain(node: fx.Node) -> bool:
    return (node.op != "call_module" and node.target in ELEMENTWISE) or _name(node) in PLAIN


def _bends(node: fx.Node) -> bool:
    module = called_module(node)
    if module is not None and ([*module.parameters()] or module._forward_hooks or module._forward_pre_hooks):
        return False
    return kind_of(node).activation or _name(node) in BENDS


def _name(node: fx.Node) -> str:
    """Return the name of a node's function, without the marks of in-place ops and operators."""
    name = name_called(node).strip("_")
    return name[1:] if name[1:] in PLAIN else name


def _function_of(ops: Sequence[fx.Node], source: fx.Node) -> Callable[..., Tensor] | None:
    """Return the function of the table that computes the same as some ops; None if there is none."""
    values: dict[fx.Node, Tensor] = {source: _numbers().clone()}  # which an op may change
    for node in reversed(ops):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = callable_of(node)(*args, **kwargs)
    found, (functions, expected) = values[ops[0]], _recognized()
    equal = ((found - expected).abs() <= TOLERANCE * expected.abs().clamp_min(1)).all(1).tolist()
    return functions[equal.index(True)] if any(equal) else None


@cache
def _numbers() -> Tensor:
    near = torch.linspace(
        -12, 12, 385, dtype=torch.float64, device="cpu"
    )  # zero and the ends of hard activations among them
    return torch.cat([near, near * 100])


@cache
def _recognized() -> tuple[list[Callable[..., Tensor]], Tensor]:
    """Return the functions of the table that are recognized, and a row of each one's results."""
    functions = [function for kind in KINDS.values() for function in kind.recognized]
    return functions, torch.stack([function(_numbers()) for function in functions])


def _have_one_rule(ops: Sequence[fx.Node], rules: LayerRules) -> bool:
    found = [rule_of_node(node, rules) for node in ops]
    return not any(rule.is_explicit for rule in found) and all(rule.qconfig == found[0].qconfig for rule in found)
