"""Residual adds: which branch stays unquantized, so that the target computes its convolution and the add as one."""

import heapq

from torch import fx

from qtoolkit.graph.placement.roles import Roles
from qtoolkit.graph.placement.traversal import origin
from qtoolkit.op_kinds.nodes import has_float_weight, kind_of, tensor_inputs


def free_branch(node: fx.Node, roles: Roles) -> fx.Node | None:
    """Return the input of a residual add that stays unquantized; None for other ops and other targets."""
    if roles.backend.residual_add == "both" or not kind_of(node).adds:
        return None
    branches = [source for source in tensor_inputs(node) if layer_before(source) is not None]
    if len(branches) < 2:
        return branches[0] if branches else None
    # Both branches end in a layer: the longer one is the main branch, the other the shortcut.
    first, second = lengths_from_fork(branches[0], branches[1])
    return branches[0] if first >= second else branches[1]


def fuses(node: fx.Node, roles: Roles) -> bool:
    """Return whether the target computes a residual add as part of a convolution."""
    free = free_branch(node, roles)
    layer = None if free is None else layer_before(free)
    return layer is not None and kind_of(layer).fuses_add


def layer_before(node: fx.Node) -> fx.Node | None:
    """Return the quantized layer that computes a tensor, alone or with its batch norm, and that has no other user."""
    layer = origin(node, sole_user=True)
    return layer if layer is not None and kind_of(layer).layer and not has_float_weight(layer) else None


def lengths_from_fork(first: fx.Node, second: fx.Node) -> tuple[int, int]:
    """Return how many nodes each of two branches has that the other does not share, back to where they fork."""
    order = {node: -i for i, node in enumerate(first.graph.nodes)}
    reached = {first: {0}, second: {1}}
    waiting = [(order[node], i) for i, node in enumerate((first, second))]
    nodes = {order[node]: node for node in (first, second)}
    heapq.heapify(waiting)
    counts = [0, 0]
    while any(len(reached[nodes[key]]) == 1 for key, _ in waiting):
        key, _ = heapq.heappop(waiting)
        node = nodes[key]
        if len(reached[node]) == 1:
            counts[next(iter(reached[node]))] += 1
        for source in node.all_input_nodes:
            if source not in reached:
                nodes[order[source]] = source
                heapq.heappush(waiting, (order[source], 0))
            reached[source] = reached.get(source, set()) | reached[node]
    return counts[0], counts[1]
