"""The calls of a model's blocks as tracing saw them: the caller, the block, its arguments and its results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The first call of a traced model is the call of the model itself.
ROOT = 0


@dataclass(frozen=True)
class Value:
    """The value of a graph node, among the arguments or results of a call."""

    node: str  # the name of the node at tracing


@dataclass(frozen=True)
class Foreign:
    """A value of a type that a graph cannot pass to a block, or get from it."""

    type_name: str  # the name of the type


@dataclass(frozen=True)
class BlockCall:
    """A call of a block. Arguments and results are tuples, lists and dicts of `Value`, plain values and `Foreign`."""

    block: str  # the dotted name of the block; "" for the model
    parent: int = ROOT  # the index of the call that calls the block
    names: tuple[str, ...] = ()  # names of the positional arguments
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    result: object = None  # what the block returns


def map_leaves(tree: object, function: Callable[[Any], object]) -> Any:
    """Return nested tuples, lists and dicts with a function applied to their values."""
    if isinstance(tree, dict):
        return type(tree)((key, map_leaves(item, function)) for key, item in tree.items())
    if isinstance(tree, tuple | list):
        items = [map_leaves(item, function) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def ancestors(calls: tuple[BlockCall, ...], call: int) -> list[int]:
    """Return a call and the calls around it, from the model's inwards."""
    path = [call]
    while path[-1] != ROOT:
        path.append(calls[path[-1]].parent)
    return path[::-1]
