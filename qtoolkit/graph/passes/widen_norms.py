"""Compute norms in float32 in a model of float16: squares of values above 255 overflow, and an eps below 6e-8 is zero.

Examples are `F.normalize`, and norms written by hand: `x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`. The nodes from
the squares, or from a call of `norm`, to the product or quotient with x stand between casts, which exporters write as Casts.
"""

from torch import fx
from torch.nn import functional as F

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.rules import CASTS, name_called
from qtoolkit.op_kinds.table import calls_where

PRODUCTS = calls_where(lambda kind: kind.elementwise_product)
NORMS = ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm")
REDUCTIONS = ("mean", "sum")
BEHIND = ("add", "clamp", "clamp_min", "maximum", "sqrt", "rsqrt", "reciprocal", "pow", "div", "truediv", "expand")
QUOTIENTS = ("div", "truediv", "true_divide", "divide")


def run(gm: QuantizedGraphModule) -> None:
    """Put casts around norms, where x itself is no cast."""
    firsts = [node for node in gm.graph.nodes if _begins(node)]
    for first in firsts:
        x = first.all_input_nodes[0]
        chain = _chain(first, x)
        with gm.graph.inserting_before(first):
            wide = gm.graph.call_method("float", (x,))
        for node in chain:
            node.replace_input_with(x, wide)
        with gm.graph.inserting_after(chain[-1]):
            narrow = gm.graph.call_method("type_as", (chain[-1], x))
        chain[-1].replace_all_uses_with(narrow)
        narrow.args = (chain[-1], x)
        for node in (wide, narrow):
            set_facts(node, call=facts_of(first).call)
    if firsts:
        gm.recompile()


def _begins(node: fx.Node) -> bool:
    """Return whether a node computes a norm of a tensor, or squares a tensor whose mean or sum alone is taken."""
    name, sources, takers = name_called(node), node.all_input_nodes, list(node.users)
    is_product = node.target in PRODUCTS and len(node.args) == 2 and node.args[0] is node.args[1]
    squares = {"square": True, "pow": node.args[1:] in ((2,), (2.0,))}.get(name, is_product)
    is_cast = len(sources) == 1 and sources[0].op == "call_method" and name_called(sources[0]) in CASTS
    if len(sources) != 1 or is_cast or facts_of(node).is_discrete:
        return False
    is_reduced = len(takers) == 1 and name_called(takers[0]) in REDUCTIONS
    return name in NORMS or node.target is F.normalize or (squares and is_reduced)


def _chain(first: fx.Node, x: fx.Node) -> list[fx.Node]:
    """Return the nodes from the first one of a norm of x to the one that normalizes x, or to the last one of the norm alone."""
    chain = [first]
    while first.target is not F.normalize and len(chain[-1].users) == 1:
        taker = next(iter(chain[-1].users))
        others, name = [source for source in taker.all_input_nodes if source is not chain[-1]], name_called(taker)
        if others == [x] and (taker.target in PRODUCTS or (name in QUOTIENTS and taker.args[0] is x)):
            return [*chain, taker]
        known = name in (*BEHIND, *REDUCTIONS) and all(other.op == "get_attr" for other in others)
        if not known and not (name == "expand_as" and others == [x]):
            break
        chain.append(taker)
    return chain
