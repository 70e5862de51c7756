"""Views of a tensor in an order that saves a copy of its gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Argument


class PermutedParts(NamedTuple):
    """`unbind` of `permute`, as an attention takes query, key and value from one linear layer."""

    permute: fx.Node
    source: fx.Node  # that is permuted
    dims: tuple[int, ...]
    dim: int  # of the permuted tensor, along which it is taken apart

    @classmethod
    def of(cls, node: fx.Node) -> "PermutedParts | None":
        """Return the parts that a node takes; None if it is another op, or sizes decide the order."""
        permute, *given = _arguments(node) if node.target in ("unbind", torch.unbind) else [None]
        if not isinstance(permute, fx.Node) or permute.target not in ("permute", torch.permute):
            return None
        source, *dims = _arguments(permute)
        (dim,) = given or [0]
        numbers = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
        order = [each for each in numbers if isinstance(each, int)]
        if not (isinstance(source, fx.Node) and isinstance(dim, int) and order and len(order) == len(numbers)):
            return None
        return cls(permute, source, tuple(each % len(order) for each in order), dim % len(order))


def _arguments(node: fx.Node) -> list[Argument]:
    """Return the arguments of a node in the order in which both ops have them, by name or not."""
    named = (node.kwargs[name] for name in ("input", "dims", "dim") if name in node.kwargs)
    return [*node.args, *named]


def unbind_permuted(x: Tensor, dims: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """Return `x.permute(dims).unbind(dim)`, so that the gradients of the parts are stacked in the order of `x`.

    Autograd of torch stacks them in the permuted order, and copies the result to get the gradient of what `x` is a view of.
    """
    order = [each - (each > dims[dim]) for place, each in enumerate(dims) if place != dim]
    return tuple(part.permute(order) for part in x.unbind(dims[dim]))
