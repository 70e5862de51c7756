"""Facts that tracing finds out about a graph node, in the node's meta."""

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

KEY = "qtoolkit"


@dataclass(frozen=True)
class NodeFacts:
    """The facts of tracing about a node beyond its target and arguments."""

    # whether the node returned a number, or several, and no tensor; None where tracing did not see its result
    is_number: bool | None = None
    is_discrete: bool = False  # the node returned a tensor of integers or booleans, or several, and nothing else
    is_sequence: bool = False  # the node returned a list or a tuple with tensors
    # the number of dimensions of the tensor that the node takes first; None where it takes none, or where it is not known
    input_dims: int | None = None
    # the node calls a module that returns its input in eval mode, and has another value in training mode
    returns_input: bool = False
    training_alone: bool = False  # training mode alone takes what the node computes
    in_training: bool = False  # training mode alone takes it, and all of it goes into ops of both modes
    # the node comes from an augmented assignment such as `+=`, which torch.fx records as `+`
    assigns_in_place: bool = False
    # the index of the call of a block, among those that tracing saw, that made the node. None for a node that was put in
    # later
    call: int | None = None
    replaces: tuple[str, ...] = ()  # names of nodes that this one has replaced


def facts_of(node: fx.Node) -> NodeFacts:
    """Return the facts about a node."""
    facts: NodeFacts = node.meta.get(KEY, NodeFacts())
    return facts


def set_facts(node: fx.Node, **facts: Any) -> None:
    """Set facts about a node, by the names of `NodeFacts`. Copies and pickles of a QuantizedGraphModule keep them."""
    node.meta[KEY] = replace(facts_of(node), **facts)


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Let the users of a node take another one, and erase it. The new one keeps the place of the old one in the model."""
    known, facts = facts_of(new), facts_of(old)
    call = facts.call if known.call is None else known.call
    set_facts(new, call=call, replaces=(*known.replaces, *facts.replaces, old.name))
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
