"""Facts that tracing finds out about a graph node, in the node's meta."""

from dataclasses import dataclass, replace

from torch import fx

KEY = "qtoolkit"


@dataclass(frozen=True)
class NodeFacts:
    """What tracing knows about a node beyond its target and arguments.

    Attributes:
        is_number: The node returned a number, or several, and no tensor.
        assigns_in_place: The node comes from an augmented assignment such as `+=`, which torch.fx records as `+`.
    """

    is_number: bool = False
    assigns_in_place: bool = False


def facts_of(node: fx.Node) -> NodeFacts:
    """Return the facts about a node."""
    facts: NodeFacts = node.meta.get(KEY, NodeFacts())
    return facts


def set_facts(node: fx.Node, **facts: bool) -> None:
    """Set facts about a node, by the names of `NodeFacts`. Copies and pickles of a QuantizedGraphModule keep them."""
    node.meta[KEY] = replace(facts_of(node), **facts)
