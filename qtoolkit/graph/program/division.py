"""Divide the graph of a model among its blocks: each has a part of its own, where the graph allows it.

The graph of the model stays as it is. Only the forward that runs is divided. An inserted quantizer runs in the innermost block
that has all users of its output.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from qtoolkit.errors import with_article
from qtoolkit.graph.block_calls import ROOT, BlockCall, Foreign, Value, ancestors, map_leaves
from qtoolkit.graph.blocks import TracedBlock, find_module
from qtoolkit.graph.capture.rewrites.both_modes import of_one_mode
from qtoolkit.model_inputs import leaves
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.recorded import is_mode


class NoPartError(Exception):
    """A block has no part of the graph that could run as its forward; the text says why."""


@dataclass
class Part:
    """A block's part of the graph."""

    block: TracedBlock
    call: BlockCall
    args: tuple[Any, ...] = ()  # its positional arguments, with nodes of the graph
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None  # what it returns


def free_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that only read something of the model, so that every part can read it for itself."""
    return {node for node in gm.graph.nodes if node.op == "get_attr" or is_mode(node)}


class Division:
    """The parts of a model's graph, by the calls of its blocks."""

    def __init__(self, gm: fx.GraphModule, calls: tuple[BlockCall, ...]) -> None:
        self.gm, self.calls = gm, calls
        self.paths = [ancestors(calls, call) for call in range(len(calls))]
        self.free = free_nodes(gm)
        self.of_eval_mode, self.of_training_mode = (of_one_mode(gm.graph, training) for training in (False, True))
        self.nodes = [node for node in gm.graph.nodes if node not in self.free]
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.path_of = self._paths_of_nodes()
        self.members: dict[int, list[fx.Node]] = {call: [] for call in range(len(calls))}
        for node in self.nodes:
            for call in self.path_of[node]:
                self.members[call].append(node)
        self.current = {name: node for node in gm.graph.nodes for name in (*facts_of(node).replaces, node.name)}
        self.parts: dict[int, Part] = {}  # the parts of the blocks that can run them, by the indices of their calls
        self.reasons: dict[TracedBlock, str] = {}  # why other blocks that are called cannot
        counts = Counter(call.block for call in calls)
        for index in range(ROOT + 1, len(calls)):
            block = find_module(gm, calls[index].block)
            if isinstance(block, TracedBlock):
                try:
                    self.parts[index] = self._part(block, index, counts[calls[index].block])
                except NoPartError as reason:
                    self.reasons[block] = str(reason)
        self._return_what_inner_blocks_return()

    def whole(self) -> "Division":
        """Return the division that runs the graph in one piece."""
        result = copy.copy(self)
        result.parts = {}
        return result

    # ---- which node is in which call

    def _paths_of_nodes(self) -> dict[fx.Node, list[int]]:
        """Return the calls around each node, the model's first."""
        found: dict[fx.Node, list[int]] = {}
        for node in reversed(self.nodes):
            call = facts_of(node).call
            found[node] = self._path_around(node, [found[u] for u in node.users]) if call is None else self.paths[call]
        return found

    def _path_around(self, node: fx.Node, users: Sequence[list[int]]) -> list[int]:
        """Return the calls around an inserted node: the innermost that has all its users, and the calls that make its input.

        A call that makes the input of the node, and has a user of it, cannot take the node's result from outside.
        """
        shared = [calls[0] for calls in zip(*users, strict=False) if len(set(calls)) == 1] or [ROOT]
        made = {call for source in node.all_input_nodes for call in self.paths[facts_of(source).call or ROOT]}
        around = max((sum(call in made for call in path) for path in users), default=0)
        inner = next((path for path in users if sum(call in made for call in path) == around), [])
        return shared if around <= len(shared) else inner[:around]

    def _is_in(self, node: fx.Node, call: int) -> bool:
        return call in self.path_of[node]

    # ---- what a block takes and returns

    def _part(self, block: TracedBlock, index: int, count: int) -> Part:
        call = self.calls[index]
        if count > 1:
            raise NoPartError(f"the model calls it {count} times")
        inside = self.members[index]
        first = self._first_of(inside)
        taken = {s for node in inside for s in node.all_input_nodes if s not in self.free and not self._is_in(s, index)}
        given = {node for node in inside if any(not self._is_in(user, index) for user in node.users)}
        arguments = self._values((call.args, call.kwargs), "takes")
        result = self._values(call.result, "returns", required=True)
        inputs = _stand_ins(taken, arguments, "takes {}, which is not among its arguments")
        if any(self.order[value] > self.order[first] for value in inputs.values()):
            raise NoPartError("it takes a value that is computed after its first op")
        outputs = _stand_ins(given, result, "computes {}, which it does not return")
        args, kwargs = map_leaves(arguments, lambda leaf: inputs.get(leaf, leaf))
        returned = map_leaves(result, lambda leaf: outputs.get(leaf, inputs.get(leaf, leaf)))
        known = {value for _, value in leaves((args, kwargs))}
        for _, value in leaves(returned):
            if isinstance(value, fx.Node) and not (value in known or value in self.free or self._is_in(value, index)):
                raise NoPartError(f"it returns {value.name!r}, which is computed outside of it")
        return Part(block, call, args, kwargs, returned)

    def _return_what_inner_blocks_return(self) -> None:
        """Let a block return the quantized tensor that an inner block returns in place of its input, if nobody reads it."""
        for index, part in self.parts.items():
            pairs = zip(leaves(self._values(part.call.result, "returns")), leaves(part.result), strict=True)
            nodes = ((own, found) for (_, own), (_, found) in pairs if isinstance(own, fx.Node) and own in self.order)
            inside = {own: found for own, found in nodes if self._is_in(own, index)}
            for outer in set(self.paths[index][:-1]) & self.parts.keys():
                self.parts[outer].result = map_leaves(self.parts[outer].result, partial(_in_place_of, inside))

    def _first_of(self, inside: Sequence[fx.Node]) -> fx.Node:
        """Return the first node that tracing saw in a call; no other nodes may lie between it and the last one."""
        traced = [node for node in inside if facts_of(node).call is not None]
        if not traced:
            raise NoPartError("the graph has no op of it")
        members = set(inside)
        for node in self.nodes[self.order[traced[0]] : self.order[traced[-1]]]:
            if node not in members and facts_of(node).call is not None:
                raise NoPartError(f"{node.name!r}, which is not in it, lies between its ops")
        return traced[0]

    def _values(self, tree: Any, what: str, required: bool = False) -> Any:
        """Return the arguments or the result of a call with nodes; None for nodes that the graph does not have now."""
        for _, leaf in leaves(tree):
            if isinstance(leaf, Foreign):
                raise NoPartError(f"it {what} {with_article(leaf.type_name)}, which a graph does not pass on")
            if required and isinstance(leaf, Value) and leaf.node not in self.current:
                raise NoPartError(f"it {what} {leaf.node!r}, which the graph does not compute now")
        return map_leaves(tree, lambda leaf: self.current.get(leaf.node) if isinstance(leaf, Value) else leaf)

    def items(self, index: int) -> Iterator[fx.Node | int]:
        """Yield the contents of a part, in order: nodes, and the indices of the calls of blocks."""
        called = set[int]()
        for node in self.members[index]:
            path = self.path_of[node]
            inner = next((call for call in path[path.index(index) + 1 :] if call in self.parts), None)
            if inner is None:
                yield node
            elif inner not in called and facts_of(node).call is not None:
                called.add(inner)
                yield inner


def _in_place_of(nodes: Mapping[fx.Node, object], value: object) -> object:
    return nodes.get(value, value) if isinstance(value, fx.Node) else value


def _stand_ins(used: set[fx.Node], tree: Any, why: str) -> dict[fx.Node, fx.Node]:
    """Return for each node in arguments or a result the node that takes its place: that node, or its only quantizer.

    Raises NoPartError: a node that is used is neither.
    """
    known = {leaf for _, leaf in leaves(tree) if isinstance(leaf, fx.Node)}
    places = {node: node for node in used & known}
    for node in used - known:
        source = node.all_input_nodes[0] if facts_of(node).call is None and len(node.all_input_nodes) == 1 else node
        if source not in known or source in places:
            raise NoPartError(f"it {why.format(repr(node.name))}")
        places[source] = node
    return places
