"""Python that branches on self.training: the graphs of both modes become one, which reads the mode where they differ.

The graphs are aligned like two versions of a text. Ops that both have are computed once: a layer that both call has one
node, one quantizer of its input and one scale. If it takes another value in each mode, `by_mode` selects it.

`dropout = self.dropout if self.training else 0.0` gives a graph with the same ops in both modes, and other numbers. In training
mode there may be more ops: dropouts, stochastic depth, an auxiliary head, whose values the model returns. Eval mode computes
them too, and takes its own values: so a calibration, which runs in eval mode, gives their quantizers ranges. In eval mode there
may be more ops as well, as of a detector that decodes boxes; training mode does not run them (`qtoolkit/graph/program/`).
`qtoolkit.convert` keeps what eval mode takes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn import functional as F

from qtoolkit.graph.block_calls import ROOT, BlockCall, Value, ancestors, map_leaves
from qtoolkit.graph.capture.rewrites.in_place import base_of, changed_by
from qtoolkit.graph.capture.shapes import is_plain
from qtoolkit.graph.nodes import is_output, kind_of, kind_of_module
from qtoolkit.model_inputs import leaves
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.recorded import by_mode, check_none, check_size, set_item
from qtoolkit.op_kinds.rules import name_called
from qtoolkit.op_kinds.table import KINDS

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
# Checks, each with the value that passes one, from its arguments.
CHECKS: Mapping[object, Callable[..., Argument]] = {
    check_size: lambda value, expected, where: expected,
    check_none: lambda value, message: None,
    torch._assert: lambda condition, message: True,
}
# Functions and methods that make a tensor of their own, which an op of training mode may change in place.
NEW = ("arange", "clone", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros")


class UnlikeError(Exception):
    """The graphs of both modes do not become one."""


class Traced(NamedTuple):
    """A model with its graph, traced in one mode."""

    model: nn.Module
    graph: fx.Graph
    modes: Mapping[nn.Module, fx.Node]  # the node of the graph that reads the training mode of each submodule
    calls: list[BlockCall]  # the calls of blocks that its nodes belong to


@dataclass(frozen=True, eq=False)
class Choice:
    """Two arguments, of the mode of the graph and of the other mode."""

    own: Argument
    other: Argument

    @property
    def is_possible(self) -> bool:
        """Whether both are numbers, strings or None, or both values that the graph computes."""
        sides = (self.own, self.other)
        return all(map(is_plain, sides)) or all(isinstance(side, fx.Node) for side in sides)

    def in_modes(self, own_trains: bool) -> tuple[Argument, Argument]:
        """Return the arguments of training and of eval mode."""
        return (self.own, self.other) if own_trains else (self.other, self.own)


def merge(
    own: Traced, other: Traced, branching: Collection[nn.Module], mode_of: Callable[[nn.Module], fx.Node]
) -> bool:
    """Let a graph compute the graph of the other mode too, when the model is in that mode; return whether it does.

    `branching` are the submodules that have another mode in the other graph; `mode_of` returns the node that reads the mode of
    a submodule, before all ops. If it returns False, the graph is unchanged: ops that only training mode has change a tensor in
    place that the other ops read, or it is not known whose mode decides.
    """
    merging = _Merge(own, other, branching, mode_of)
    try:
        merging.align()
        chosen, dropouts = list(merging.choices()), merging.dropouts()
    except UnlikeError:
        merging.undo()
        return False
    for node, owner in dropouts.items():
        _read_mode(node, mode_of(owner))
    for node, owners, args, kwargs in chosen:
        _put_choices(node, owners, args, kwargs, mode_of)
    return True


def have_the_same_ops(own: Traced, other: Traced) -> bool:
    """Return whether the graphs of both modes have the same ops in the same order, perhaps with other arguments."""
    return [_key(own, node) for node in _ops(own)] == [_key(other, node) for node in _ops(other)]


class _Merge:
    def __init__(
        self,
        own: Traced,
        other: Traced,
        branching: Collection[nn.Module],
        mode_of: Callable[[nn.Module], fx.Node],
    ) -> None:
        self.model, self.own, self.other, self.branching, self.mode_of = own.model, own, other, branching, mode_of
        self.modules = {node: module for module, node in other.modes.items()}
        self.others: dict[fx.Node, fx.Node] = {}  # each node of the other graph -> the one like it, or its copy
        self.alone: dict[fx.Node, None] = {}  # nodes that the other graph does not have
        self.copies: dict[fx.Node, None] = {}  # copies of nodes that the other graph alone has
        self.calls = {ROOT: ROOT}  # each call of a block in the other graph -> the same call in this one
        self.before = len(own.calls)

    # ---- nodes

    def align(self) -> None:
        """Find the node of this graph that is like each node of the other graph, and copy the nodes without one."""
        self._align_calls()
        self._align_inputs()
        mine, theirs = _ops(self.own), _ops(self.other)
        for node, like in zip(mine, theirs, strict=False):  # that take the same values: all, in most models
            if _key(self.own, node) != _key(self.other, like) or self._chosen_nodes(node, like):
                break
            self.others[like] = node
        same = sum(node in self.others for node in theirs)
        mine, theirs = mine[same:], theirs[same:]
        place, places = 0, _alike([_key(self.own, node) for node in mine], [_key(self.other, node) for node in theirs])
        for index, node in enumerate(mine):
            if index not in places:
                self.alone[node] = None
                continue
            for each in theirs[place : places[index]]:
                self._copy(each, node)
            self._pair(node, theirs[places[index]])
            place = places[index] + 1
        for each in theirs[place:]:
            self._copy(each, _output(self.own))
        self.others[_output(self.other)] = _output(self.own)
        for node in (*self.alone, *self.copies):
            self._check_alone(node)
            self._check_sources(node)
        self._note_calls()

    def _align_inputs(self) -> None:
        """Find the arguments of forward, parameters, buffers and constants."""
        mine, theirs = (traced.graph.find_nodes(op="placeholder") for traced in (self.own, self.other))
        if [node.target for node in mine] != [node.target for node in theirs]:
            raise UnlikeError
        self.others.update(zip(theirs, mine, strict=True))
        first = next(node for node in self.own.graph.nodes if node.op != "placeholder")
        known = self.own.graph.find_nodes(op="get_attr")
        for node in self.other.graph.find_nodes(op="get_attr"):
            like = next((each for each in known if each.target == node.target or self._are_equal(each, node)), None)
            if like is None:
                self._copy(node, first)
                continue
            self.others[node] = like
            if like is not first:  # an op of the other mode may read it before the ops of this one
                first.prepend(like)

    def _are_equal(self, *nodes: fx.Node) -> bool:
        """Return whether nodes read equal tensors that Python computes anew in each trace: neither parameters nor buffers."""
        mine, theirs = (vars(self.model).get(str(node.target)) for node in nodes)
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            return False
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)

    def _chosen_nodes(self, mine: fx.Node, theirs: fx.Node) -> bool:
        """Return whether a node takes another value that is computed than the node like it."""
        return any(isinstance(choice.own, fx.Node) for choice in _choices_in(*self._arguments(mine, theirs)))

    def _pair(self, mine: fx.Node, theirs: fx.Node) -> None:
        """Let a node compute the node like it too; both stay if it cannot take the arguments of the other mode."""
        if all(choice.is_possible for choice in _choices_in(*self._arguments(mine, theirs))):
            self.others[theirs] = mine
        else:
            self.alone[mine] = None
            self._copy(theirs, mine)

    def _copy(self, node: fx.Node, following: fx.Node) -> None:
        with self.own.graph.inserting_before(following):
            self.others[node] = copied = self.own.graph.node_copy(node, self._mapped)
        call = facts_of(node).call
        set_facts(copied, call=None if call is None else self.calls[call])
        self.copies[copied] = None

    def _arguments(self, mine: fx.Node, theirs: fx.Node) -> tuple[object, object]:
        """Return the arguments of a node, with choices where the node like it has others."""
        args, kwargs = fx.node.map_arg((theirs.args, theirs.kwargs), self._mapped)
        return _both(mine.args, args), _both(mine.kwargs, kwargs)

    def _mapped(self, node: fx.Node) -> fx.Node:
        return self.mode_of(self.modules[node]) if node in self.modules else self.others[node]

    def undo(self) -> None:
        """Remove the nodes that were added to this graph."""
        unused = (node for node in self.own.modes.values() if not node.users)
        for node in (*reversed(self.copies), *unused):
            self.own.graph.erase_node(node)
        del self.own.calls[self.before :]

    # ---- calls of blocks

    def _align_calls(self) -> None:
        """Find the call of a block in this graph for each call in the other one, or add it."""
        waiting = list(range(ROOT + 1, self.before))
        for index, call in enumerate(self.other.calls[ROOT + 1 :], ROOT + 1):
            place = call.block, self.calls[call.parent]
            like = next((i for i in waiting if (self.own.calls[i].block, self.own.calls[i].parent) == place), None)
            if like is None:
                self.calls[index] = len(self.own.calls)
                self.own.calls.append(replace(call, parent=place[1]))
            else:
                waiting.remove(like)
                self.calls[index] = like

    def _note_calls(self) -> None:
        """Let the calls that were added name the nodes of this graph."""
        names = {node.name: like.name for node, like in self.others.items()}

        def named(leaf: object) -> object:
            return Value(names.get(leaf.node, leaf.node)) if isinstance(leaf, Value) else leaf

        for index in range(self.before, len(self.own.calls)):
            call = self.own.calls[index]
            args, kwargs, result = (map_leaves(tree, named) for tree in (call.args, dict(call.kwargs), call.result))
            self.own.calls[index] = replace(call, args=args, kwargs=kwargs, result=result)

    # ---- choices

    def choices(self) -> Iterator[tuple[fx.Node, dict[Choice, nn.Module], object, object]]:
        """Yield the nodes that differ: each with its choices and the submodules whose modes decide, and its arguments."""
        for theirs, mine in self.others.items():
            if mine not in self.copies and mine.op not in ("placeholder", "get_attr"):
                args, kwargs = self._arguments(mine, theirs)
                if found := _choices_in(args, kwargs):
                    yield mine, {choice: self._owner_of(mine, choice) for choice in found}, args, kwargs
        for check in (node for node in (*self.alone, *self.copies) if node.target in CHECKS):
            sides = check.args[0], CHECKS[check.target](*check.args)
            choice = Choice(*(sides if check in self.alone else reversed(sides)))
            yield check, {choice: self._owner(check)}, (choice, *check.args[1:]), {}

    def _owner_of(self, node: fx.Node, choice: Choice) -> nn.Module:
        """Return the submodule whose mode decides a choice: the submodule around the ops of one mode alone, if it takes any."""
        sides = [leaf for _, leaf in leaves((choice.own, choice.other))]
        alone = [side for side in sides if isinstance(side, fx.Node) and self._is_alone(side)]
        owners = {self._owner(each) for each in (alone or [node])}
        outermost = [owner for owner in owners if owners.issubset(owner.modules())]
        if not outermost:
            raise UnlikeError
        return outermost[0]

    def _owner(self, node: fx.Node) -> nn.Module:
        """Return the submodule whose mode decides: the innermost around a node that branches, or else the only one.

        A submodule that one mode alone calls decides nothing.
        """
        path = ancestors(tuple(self.own.calls), facts_of(node).call or ROOT)
        common = set(self.calls.values()).intersection(range(self.before))
        blocks = [self.model.get_submodule(self.own.calls[call].block) for call in path if call in common]
        around = [module for module in blocks if module in self.branching]
        found = around[-1:] or list(self.branching)
        if len(found) != 1:
            raise UnlikeError
        return found[0]

    def dropouts(self) -> dict[fx.Node, nn.Module]:
        """Return the dropouts that training mode alone has, each with the submodule whose mode decides."""
        alone = [node for node in (*self.alone, *self.copies) if node.target in DROPOUTS]
        return {node: self._owner(node) for node in alone if self._trains(node)}

    # ---- nodes of one mode alone

    def _is_alone(self, node: fx.Node) -> bool:
        return node in self.alone or node in self.copies

    def _check_alone(self, node: fx.Node) -> None:
        """Raise UnlikeError for a node of one mode alone that must not run in the other one."""
        is_check = node.target in CHECKS
        if is_check and (len(node.args) < 2 or node.kwargs):
            raise UnlikeError
        changed = self._changed_by(node)
        base = changed
        while changed is not None:  # item after item is written
            base = base_of(changed, self.model)
            changed = self._changed_by(base)
        if base is None or self._is_new(base):
            return
        if self._trains(node) or not node.users:
            raise UnlikeError

    def _changed_by(self, node: fx.Node) -> fx.Node | None:
        written = node.args[0] if node.target is set_item else None
        return written if isinstance(written, fx.Node) else changed_by(node, self.model)

    def _check_sources(self, node: fx.Node) -> None:
        """Raise UnlikeError for a node of one mode alone that takes a node of a submodule that may be in the other mode."""
        sources = [source for source in node.all_input_nodes if self._is_alone(source)]
        owners = {self._owner(each) for each in (node, *sources)} if sources and len(self.branching) > 1 else set()
        if not all(a in set(b.modules()) or b in set(a.modules()) for a, b in combinations(owners, 2)):
            raise UnlikeError

    def _trains(self, node: fx.Node) -> bool:
        """Return whether training mode alone has a node."""
        modes = {module.training for module in self.branching}
        own_trains = modes.pop() if len(modes) == 1 else self._owner(node).training
        return own_trains is (node in self.alone)

    def _is_new(self, node: fx.Node) -> bool:
        """Return whether a node makes a tensor of its own, which no op of the other mode reads."""
        name = name_called(node).removeprefix("new_").removesuffix("_like")
        return self._is_alone(node) and (name in NEW or self._computes(node))

    def _computes(self, node: fx.Node) -> bool:
        """Return whether a node is of a kind whose result never shares the memory of an input, unless it works in place."""
        is_module = node.op == "call_module"
        kind = kind_of_module(self.model.get_submodule(str(node.target))) if is_module else kind_of(node)
        return kind.name in KINDS and not (kind.moves or kind.may_view)


def _ops(traced: Traced) -> list[fx.Node]:
    modes = set(traced.modes.values())
    return [node for node in traced.graph.nodes if node.op.startswith("call") and node not in modes]


def _key(traced: Traced, node: fx.Node) -> tuple[object, ...]:
    """Return the properties that nodes must share to become one: what they call, where, and the kinds of inputs and outputs."""
    facts, takes = facts_of(node), map_leaves((node.args, node.kwargs), lambda leaf: isinstance(leaf, fx.Node))
    return node.op, node.target, traced.calls[facts.call or ROOT].block, replace(facts, call=None), str(takes)


def _alike(mine: Sequence[object], theirs: Sequence[object]) -> dict[int, int]:
    """Return for places in a list the places of equal items in another one, in order, as many as `diff` finds: the last ones.

    Ops that one mode alone has often come before the op of both that takes their result.
    """
    blocks = SequenceMatcher(None, mine[::-1], theirs[::-1], autojunk=False).get_matching_blocks()
    ends = (len(mine) - 1, len(theirs) - 1)
    return {ends[0] - block.a - i: ends[1] - block.b - i for block in blocks for i in range(block.size)}


def _output(traced: Traced) -> fx.Node:
    output: fx.Node = traced.graph.find_nodes(op="output")[0]
    return output


def _choices_in(args: object, kwargs: object) -> list[Choice]:
    return [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Choice)]


def _both(own: Argument, other: Argument) -> Any:
    """Return arguments with a Choice wherever both modes differ."""
    if isinstance(own, dict) and isinstance(other, dict) and list(own) == list(other):
        return {key: _both(value, other[key]) for key, value in own.items()}
    if isinstance(own, tuple | list) and isinstance(other, type(own)) and len(own) == len(other):
        return type(own)(_both(*each) for each in zip(own, other, strict=True))
    if own is other or (type(own) is type(other) and own == other):
        return own
    return Choice(own, other)


def _put_choices(
    node: fx.Node,
    owners: Mapping[Choice, nn.Module],
    args: object,
    kwargs: object,
    mode_of: Callable[[nn.Module], fx.Node],
) -> None:
    def written(value: object) -> object:
        if not isinstance(value, Choice):
            return value
        owner = owners[value]
        in_training, in_eval = value.in_modes(owner.training)
        if isinstance(in_training, fx.Node) and in_training.target in DROPOUTS and in_training.args[:1] == (in_eval,):
            return in_training  # it reads the mode
        return _choice(node, mode_of(owner), in_training, in_eval)

    node.args, node.kwargs = map_leaves(args, written), map_leaves(kwargs, written)


def _read_mode(dropout: fx.Node, mode: fx.Node) -> None:
    """Let a dropout that is always on draw no random numbers in eval mode."""
    input_and_p, rest = dropout.args[:2], dropout.args[2:]
    if rest:
        dropout.args = (*input_and_p, mode if rest[0] is True else rest[0], *rest[1:])
    elif dropout.kwargs.get("training", True) is True:
        dropout.update_kwarg("training", mode)


def note_training_mode(graph: fx.Graph) -> None:
    """Note which nodes of a merged graph training mode alone takes, and which of these for an op of both modes."""
    for node in reversed(graph.nodes):
        takers = list(node.users)
        alone = [facts_of(user).training_alone or _is_taken_in_training(node, user) for user in takers]
        if takers and all(alone):
            before = [facts_of(user).in_training or (user.target is by_mode and not is_output(user)) for user in takers]
            set_facts(node, training_alone=True, in_training=all(before))


def _is_taken_in_training(node: fx.Node, user: fx.Node) -> bool:
    return user.target is by_mode and _places_in(node, user) == [1]


def _places_in(node: fx.Node, user: fx.Node) -> list[int]:
    """Return the places of a node among the arguments of another one, in nested containers too."""
    return [place for place, value in enumerate(user.args) if node in [leaf for _, leaf in leaves(value)]]


def of_one_mode(graph: fx.Graph, training: bool) -> dict[fx.Node, fx.Node]:
    """Return the nodes that training mode alone takes, or eval mode, each with the node that reads the mode which decides."""
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes) if graph.find_nodes(op="call_function", target=by_mode) else ():
        if node.op.startswith("call"):
            deciding = {found.get(user) or _deciding(node, user, 1 if training else 2) for user in node.users}
            if len(deciding) == 1 and (mode := deciding.pop()) is not None:
                found[node] = mode
    return found


def _deciding(node: fx.Node, user: fx.Node, place: int) -> fx.Node | None:
    """Return the node that reads the mode, where a user takes a node at this place among the values of both modes alone."""
    return user.all_input_nodes[0] if user.target is by_mode and _places_in(node, user) == [place] else None


def _choice(node: fx.Node, mode: fx.Node, in_training: Argument, in_eval: Argument) -> fx.Node:
    with node.graph.inserting_before(node):
        chosen = node.graph.call_function(by_mode, (mode, in_training, in_eval))
    set_facts(chosen, call=facts_of(node).call, is_number=all(map(_is_number, (in_training, in_eval))))
    return chosen


def _is_number(value: object) -> bool:
    return bool(facts_of(value).is_number) if isinstance(value, fx.Node) else is_plain(value)


def keep_eval(graph: fx.Graph) -> None:
    """Let a graph take the values of eval mode, and remove nodes that only the others need."""
    for node in graph.find_nodes(op="call_function", target=by_mode):
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), partial(_in_eval, node))
            if user.target in CHECKS and not user.all_input_nodes:  # of training mode alone
                graph.erase_node(user)
        _erase_unused(node)


def _in_eval(choice: fx.Node, argument: fx.Node) -> Argument:
    return choice.args[2] if argument is choice else argument


def _erase_unused(node: fx.Node) -> None:
    if not node.users and node.op != "placeholder":
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase_unused(source)
