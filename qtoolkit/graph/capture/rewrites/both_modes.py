"""Python that branches on self.training: the graphs of both modes become one, which reads the mode where they differ.

`dropout = self.dropout if self.training else 0.0` gives a graph with the same ops in both modes, and other numbers. In training
mode there may also be dropouts, and more ops: an auxiliary head, whose values the model returns, or stochastic
depth, between other ops. Eval mode then computes them too, and takes its own values; `qtoolkit.convert` removes them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn import functional as F

from qtoolkit.graph.block_calls import ROOT, BlockCall, ancestors, map_leaves
from qtoolkit.graph.capture.rewrites.in_place import base_of, changed_by
from qtoolkit.graph.capture.shapes import is_plain
from qtoolkit.graph.nodes import kind_of, kind_of_module
from qtoolkit.model_inputs import leaves
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.recorded import by_mode, check_none, check_size
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
    calls: Sequence[BlockCall]  # the calls of blocks that its nodes belong to


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

    @property
    def dropout(self) -> fx.Node | None:
        """The first, where it is a dropout of the second."""
        node = self.own
        if isinstance(node, fx.Node) and node.target in DROPOUTS and node.args[:1] == (self.other,):
            return node
        return None


def merge(
    own: Traced, other: Traced, branching: Collection[nn.Module], mode_of: Callable[[nn.Module], fx.Node]
) -> bool:
    """Let a graph compute what the graph of the other mode does, where the model is in that mode; return whether it does.

    `branching` are the submodules that have another mode in the other graph; `mode_of` returns the node that reads the mode of
    a submodule, before all ops. Where it does not, the graph is unchanged: the other mode has ops of its own, or those that
    only training mode has change a tensor in place that the other ops read.
    """
    try:
        chosen = list(_Merge(own, other, branching).choices())
    except UnlikeError:
        return False
    for node, owner, args, kwargs in chosen:
        _put_choices(node, owner, args, kwargs, mode_of)
    return True


class _Merge:
    def __init__(self, own: Traced, other: Traced, branching: Collection[nn.Module]) -> None:
        self.model, self.own, self.other, self.branching = own.model, own, other, branching
        modules = {node: module for module, node in other.modes.items()}
        self.modes = {node: own.modes.get(module) for node, module in modules.items()}
        self.others: dict[fx.Node, fx.Node] = {}  # each node of the other graph -> the one like it
        self.alone: list[fx.Node] = []  # nodes that the other graph does not have
        self._pair()

    def choices(self) -> Iterator[tuple[fx.Node, nn.Module, object, object]]:
        """Yield the nodes that differ, each with the submodule whose mode decides and its arguments with choices."""
        for counterpart, node in self.others.items():
            args, kwargs = self._arguments(node, counterpart)
            if found := _choices_in(args, kwargs):
                yield node, self._owner_of(node, found), args, kwargs
        for check in (node for node in self.alone if node.target in CHECKS):
            passing = CHECKS[check.target](*check.args)
            yield check, self._owner(check), (Choice(check.args[0], passing), *check.args[1:]), {}

    def _arguments(self, mine: fx.Node, theirs: fx.Node) -> tuple[object, object]:
        """Return the arguments of a node, with choices where the node like it has others."""
        args, kwargs = fx.node.map_arg((theirs.args, theirs.kwargs), self._mapped)
        return _both(mine.args, args), _both(mine.kwargs, kwargs)

    def _mapped(self, node: fx.Node) -> fx.Node:
        mine = self.modes[node] if node in self.modes else self.others[node]
        if mine is None:
            raise UnlikeError
        return mine

    def _pair(self) -> None:
        """Find the first node in this graph that is like each node of the other graph, in the order of both."""
        waiting = iter(_ops(self.own))
        for theirs in _ops(self.other):
            for mine in waiting:
                if self._alike(mine, theirs) and self._may_choose(mine, theirs):
                    self.others[theirs] = mine
                    break
                self._check_alone(mine)
                self.alone.append(mine)
            else:
                raise UnlikeError
        if next(waiting, None) is not None:
            raise UnlikeError

    def _alike(self, mine: fx.Node, theirs: fx.Node) -> bool:
        here, there = _block(mine, self.own.calls), _block(theirs, self.other.calls)
        return (mine.op, here) == (theirs.op, there) and (mine.target == theirs.target or self._constants(mine, theirs))

    def _may_choose(self, mine: fx.Node, theirs: fx.Node) -> bool:
        """Return whether a node can take the arguments of the node like it in the other mode."""
        found = _choices_in(*self._arguments(mine, theirs))
        return mine.op == "output" or all(choice.is_possible for choice in found)

    def _constants(self, *nodes: fx.Node) -> bool:
        """Return whether nodes read equal tensors that Python computes anew in each trace: neither parameters nor buffers."""
        mine, theirs = (vars(self.model).get(str(node.target)) if node.op == "get_attr" else None for node in nodes)
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            return False
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)

    def _check_alone(self, node: fx.Node) -> None:
        """Raise UnlikeError for a node of this mode alone that must not run in the other one."""
        changed = changed_by(node, self.model)
        harmless = changed is None or self._is_new(base_of(changed, self.model))
        whole_check = node.target not in CHECKS or (len(node.args) > 1 and not node.kwargs)
        if not (self.model.training and harmless and whole_check) or node.op == "placeholder":
            raise UnlikeError

    def _is_new(self, node: fx.Node) -> bool:
        """Return whether a node makes a tensor of its own, which no op of the other mode reads."""
        name = name_called(node).removeprefix("new_").removesuffix("_like")
        return node in self.alone and (name in NEW or self._computes(node))

    def _computes(self, node: fx.Node) -> bool:
        """Return whether a node is of a kind whose result never shares the memory of an input, unless it works in place."""
        is_module = node.op == "call_module"
        kind = kind_of_module(self.model.get_submodule(str(node.target))) if is_module else kind_of(node)
        return kind.name in KINDS and not (kind.moves or kind.may_view)

    def _owner_of(self, node: fx.Node, choices: Sequence[Choice]) -> nn.Module:
        """Return the submodule whose mode decides a node's choices: that around the ops of this mode alone, if it takes any."""
        alone = [choice.own for choice in choices if isinstance(choice.own, fx.Node) and choice.own in self.alone]
        owners = [self._owner(each) for each in (alone or [node])]
        if any(owner is not owners[0] for owner in owners):
            raise UnlikeError
        return owners[0]

    def _owner(self, node: fx.Node) -> nn.Module:
        """Return the submodule whose mode decides: the innermost around a node that branches, or else the only one."""
        call = facts_of(node).call or ROOT
        blocks = [self.own.calls[each].block for each in ancestors(tuple(self.own.calls), call)]
        around = [module for module in map(self.model.get_submodule, blocks) if module in self.branching]
        found = around[-1:] or list(self.branching)
        if len(found) != 1:
            raise UnlikeError
        return found[0]


def _ops(traced: Traced) -> list[fx.Node]:
    modes = set(traced.modes.values())
    return [node for node in traced.graph.nodes if node not in modes]


def _block(node: fx.Node, calls: Sequence[BlockCall]) -> str:
    return calls[facts_of(node).call or ROOT].block


def _choices_in(args: object, kwargs: object) -> list[Choice]:
    return [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Choice)]


def _both(own: Argument, other: Argument) -> Any:
    """Return arguments with a Choice wherever both modes differ."""
    if isinstance(own, dict) and isinstance(other, dict) and list(own) == list(other):
        return {key: _both(value, other[key]) for key, value in own.items()}
    if isinstance(own, tuple | list) and isinstance(other, tuple | list) and len(own) == len(other):
        return type(own)(_both(*each) for each in zip(own, other, strict=True))
    if own is other or (type(own) is type(other) and own == other):
        return own
    return Choice(own, other)


def _put_choices(
    node: fx.Node, owner: nn.Module, args: object, kwargs: object, mode_of: Callable[[nn.Module], fx.Node]
) -> None:
    def written(value: object) -> object:
        if not isinstance(value, Choice):
            return value
        if (dropout := value.dropout) is not None:
            dropout.update_kwarg("training", mode_of(owner))
            return dropout
        in_modes = (value.own, value.other) if owner.training else (value.other, value.own)
        return _choice(node, mode_of(owner), *in_modes)

    node.args, node.kwargs = map_leaves(args, written), map_leaves(kwargs, written)


def note_training_mode(graph: fx.Graph) -> None:
    """Note which nodes of a merged graph training mode alone takes; not what it returns alone, which is a head of the model."""
    for node in reversed(graph.nodes):
        if node.users and all(facts_of(user).in_training or _is_choice_in_training(node, user) for user in node.users):
            set_facts(node, in_training=True)


def _is_choice_in_training(node: fx.Node, user: fx.Node) -> bool:
    taken = [place for place, value in enumerate(user.args) if value is node]
    return user.target is by_mode and taken == [1] and all(taker.op != "output" for taker in user.users)


def _choice(node: fx.Node, mode: fx.Node, in_training: Argument, in_eval: Argument) -> fx.Node:
    with node.graph.inserting_before(node):
        chosen = node.graph.call_function(by_mode, (mode, in_training, in_eval))
    set_facts(chosen, call=facts_of(node).call, is_number=all(map(_is_number, (in_training, in_eval))))
    return chosen


def _is_number(value: object) -> bool:
    return bool(facts_of(value).is_number) if isinstance(value, fx.Node) else is_plain(value)


def keep_eval(graph: fx.Graph) -> None:
    """Let a graph take the values of eval mode, and remove what only the others need."""
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
