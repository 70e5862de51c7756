"""Compute means and sums of squares in float32 in a model of float16, in which squares of values above 255 overflow.

This is what a norm written by hand does: `x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`. The nodes from the square to
the root stand between casts, which torch's exporters write as Casts.
"""

from torch import fx

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.rules import CASTS, name_called

REDUCTIONS = ("mean", "sum")
BEHIND = ("add", "clamp", "clamp_min", "maximum", "sqrt", "rsqrt", "reciprocal", "pow", "div", "truediv")


def run(gm: QuantizedGraphModule) -> None:
    """Put casts around squares with their reduction and what is computed of it alone, where x itself is no cast."""
    squares = [node for node in gm.graph.nodes if _is_reduced_square(node)]
    for square in squares:
        x, last = square.all_input_nodes[0], next(iter(square.users))
        while len(last.users) == 1 and _continues(last, next(iter(last.users))):
            last = next(iter(last.users))
        with gm.graph.inserting_before(square):
            wide = gm.graph.call_method("float", (x,))
        square.replace_input_with(x, wide)
        with gm.graph.inserting_after(last):
            narrow = gm.graph.call_method("type_as", (last, x))
        last.replace_all_uses_with(narrow, delete_user_cb=lambda user, own=narrow: user is not own)
        for node in (wide, narrow):
            set_facts(node, call=facts_of(square).call)
    if squares:
        gm.recompile()


def _is_reduced_square(node: fx.Node) -> bool:
    """Return whether a node squares a tensor whose mean or sum alone is taken."""
    name, sources, takers = name_called(node), node.all_input_nodes, list(node.users)
    squares = {"square": True, "pow": node.args[1:] in ((2,), (2.0,)), "mul": len(node.args) == 2}.get(name, False)
    if not squares or len(sources) != 1 or (sources[0].op == "call_method" and name_called(sources[0]) in CASTS):
        return False
    by_itself = name != "mul" or node.args[0] is node.args[1]  # x * 2 takes one tensor too
    return by_itself and len(takers) == 1 and name_called(takers[0]) in REDUCTIONS


def _continues(node: fx.Node, taker: fx.Node) -> bool:
    """Return whether an op computes each value of one of a node and of constants."""
    others = [source for source in taker.all_input_nodes if source is not node]
    return name_called(taker) in BEHIND and all(other.op == "get_attr" for other in others)
