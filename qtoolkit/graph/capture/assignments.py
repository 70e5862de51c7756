"""Assignments in a forward: a graph does not record them, and changes by a run or a capture are undone.

An assignment does not matter if no later forward reads its value: a map that is kept for plots, a mean that
is written before it is read, a cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from qtoolkit.model_state import CONTAINERS, contents_of, is_foreign, parts_of, values_kept
from qtoolkit.op_kinds.rules import CASTS

OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, which no forward assigns
ABSENT = object()  # stands for the value of a key that is not there
# What says nothing about the values of a tensor.
METADATA = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape")
    ]
    + [
        getattr(Tensor, name)
        for name in ("__len__", "dim", "is_contiguous", "is_floating_point", "numel", "size", "stride")
    ]
)


class StateError(RuntimeError):
    """A forward reads what an earlier one has assigned; `path` has the submodule that keeps it, with its name, if one does."""

    def __init__(self, space: "Space", key: object) -> None:
        name = f"{space.owner}.{key}".removeprefix(".") if not isinstance(space.held, set) else space.owner
        remedy = "write into the buffer" if space.kind == "buffer" else "register a buffer for it, and write into that"
        super().__init__(
            f"the forward reads and assigns to {space.kind} {name!r}, which a graph does not record; {remedy} with copy_ or "
            f"add_, or assign to a local variable."
        )
        self.path = [] if space.module is None or not space.module[0] else [space.module]


@contextmanager
def undone_assignments(model: nn.Module, check: bool = True) -> Iterator[None]:
    """Capture a model in a block; at its end the model, and other holders of values of the capture, are as before it.

    With `check` it raises StateError if the forward reads a tensor that an earlier one has left, and assigns another one.
    """
    assignments = Assignments(model)
    try:
        with assignments.reads if check and assignments.reads.watched else nullcontext():
            yield
        if check:
            assignments.check()
    finally:
        for change in assignments.changes():
            if change.is_traced():
                change.undo()


@contextmanager
def state_kept(model: nn.Module) -> Iterator["Assignments"]:
    """Run a model in a block; at its end the model, and all that its forward assigns to or writes into, are as before it."""
    assignments = Assignments(model)
    try:
        with values_kept([*model.buffers(), *assignments.tensors_of_model()]):
            yield assignments
    finally:
        assignments.assigned = assignments.changes()
        for change in assignments.assigned:
            change.undo()


@dataclass(frozen=True, eq=False)
class Space:
    """A dict, list, deque, set or class to which a forward may assign."""

    owner: str  # its dotted name
    kind: str  # of what is in it, in words
    held: Any
    module: (
        tuple[str, nn.Module] | None
    )  # the submodule that it belongs to, with its name; None if it is outside of the model
    before: Any  # a copy of it before the forward: a dict or a list

    @classmethod
    def of(cls, owner: str, kind: str, held: Any, module: tuple[str, nn.Module] | None) -> "Space":
        """Return a space with its present contents."""
        space = cls(owner, kind, held, module, {})
        return replace(space, before=space.now())

    def now(self) -> dict[Any, object] | list[object]:
        """Return a copy of its contents."""
        if isinstance(self.held, dict | type):
            return dict(dict.items(self.held) if isinstance(self.held, dict) else vars(self.held).items())
        return list(self.held)

    def changes(self) -> list["Change"]:
        """Return what differs from before: by key in a dict, otherwise all items from the first different one on."""
        now = self.now()
        if isinstance(now, dict):
            pairs = {key: (self.before.get(key, ABSENT), now.get(key, ABSENT)) for key in {**self.before, **now}}
            return [Change(self, key, *pair) for key, pair in pairs.items() if pair[0] is not pair[1]]
        same = [a is b for a, b in zip(self.before, now, strict=False)]
        is_same = all(same) and len(now) == len(self.before)
        return [] if is_same else [Change(self, [*same, False].index(False), self.before, now)]

    def values(self) -> list[object]:
        """Return the earlier contents, without the attributes of every torch module."""
        if isinstance(self.before, list):
            return self.before
        return [value for key, value in self.before.items() if key not in OF_TORCH]


class Change(NamedTuple):
    """The assignments of a forward."""

    space: Space
    key: Any  # in a list the first place that differs
    before: Any  # of a list the whole list
    now: Any

    def undo(self) -> None:
        """Restore the earlier contents."""
        self._put(self.before)

    def make(self) -> None:
        """Assign it again."""
        self._put(self.now)

    def _put(self, value: Any) -> None:
        held = self.space.held
        if isinstance(held, type):
            delattr(held, self.key) if value is ABSENT else setattr(held, self.key, value)
        elif not isinstance(held, dict):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(value)
        elif value is ABSENT:
            held.pop(self.key, None)
        else:
            held[self.key] = value

    def is_traced(self) -> bool:
        """Return whether a value of a capture was assigned."""
        return _holds_traced((self.key, self.now))

    def replaced(self) -> list[Tensor]:
        """Return the earlier tensors that a later forward would not find: all of a list that grows, as it reads the end."""
        tensors = _tensors(self.before)
        if isinstance(self.space.held, list) and len(self.now) == len(self.before):
            return [tensor for tensor in tensors if not any(tensor is other for other in self.now)]
        return tensors


class Reads(TorchFunctionMode):
    """Notes which of some tensors a function or method of torch takes, except a function that reads no values."""

    def __init__(self, watched: Sequence[Tensor]) -> None:
        super().__init__()
        self.watched = {id(tensor) for tensor in watched}
        self.noted: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        if func not in METADATA:
            self.noted.update(self.watched.intersection(map(id, tree_leaves((args, kwargs)))))
        return func(*args, **kwargs)


class Assignments:
    """The objects that a forward may assign to, and the tensors of earlier forwards that it reads."""

    assigned: Sequence[Change] = ()  # what a run has assigned, which is undone

    def __init__(self, model: nn.Module) -> None:
        self.spaces = [*_spaces(model), *_spaces_of_modules(_functions_of(model))]
        watched = [space for space in self.spaces if space.kind not in ("buffer", "variable")]
        self.reads = Reads(_tensors_in(watched))

    def changes(self) -> list[Change]:
        """Return what was assigned since, except for modes, imported Python modules and Python's own attributes."""
        found = [change for space in self.spaces for change in space.changes()]
        return [
            each
            for each in found
            if not (isinstance(each.now, ModuleType) or str(each.key).startswith("__"))
            and not (each.space.kind == "attribute" and each.key in OF_TORCH)
        ]

    def tensors_of_model(self) -> list[Tensor]:
        """Return the tensors in the model's attributes and in their containers, into which a forward may write."""
        found = _tensors_in([space for space in self.spaces if space.module is not None])
        return [tensor for tensor in {id(tensor): tensor for tensor in found}.values() if not tensor.is_inference()]

    def check(self) -> None:
        """Raise StateError if a traced value was assigned in place of a tensor that the forward reads.

        A cast of the tensor itself is a local value: each forward makes it anew. A buffer is part of the model's state.
        """
        for change in filter(Change.is_traced, self.changes()):
            for tensor in change.replaced():
                is_read = change.space.kind == "buffer" or self._is_read(tensor, change.now)
                if is_read and not self._is_cast_of(tensor, change.now):
                    raise StateError(change.space, change.key)

    def _is_read(self, tensor: Tensor, assigned: object) -> bool:
        """Return whether a forward, whose graph has made a value, reads a tensor; one that is not watched may be read."""
        if id(tensor) in self.reads.noted or id(tensor) not in self.reads.watched:
            return True
        proxy = next(leaf for leaf in parts_of(assigned) if isinstance(leaf, fx.Proxy))
        read = proxy.node.graph.find_nodes(op="get_attr")
        return any(node.users and self._is_of(tensor, node) for node in read)

    def _is_cast_of(self, tensor: Tensor, assigned: object) -> bool:
        if not isinstance(assigned, fx.Proxy):
            return False
        node = assigned.node
        while node.op == "call_method" and node.target in CASTS and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node.op == "get_attr" and self._is_of(tensor, node)

    def _is_of(self, tensor: Tensor, node: fx.Node) -> bool:
        """Return whether a node reads a tensor, under any of its names."""
        return any(
            f"{space.owner}.{key}".removeprefix(".") == node.target
            for space in self.spaces
            if space.kind in ("attribute", "buffer")
            for key, value in space.before.items()
            if value is tensor
        )


def _spaces(model: nn.Module) -> Iterator[Space]:
    """Yield the objects that a model's forward may assign to: attributes, buffers, and what is in these or its classes."""
    known: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # a leaf module
            continue
        yield Space.of(name, "attribute", vars(module), (name, module))
        yield Space.of(name, "buffer", module._buffers, (name, module))
        own = {key: value for key, value in vars(module).items() if key not in OF_TORCH}
        yield from _inner_spaces(name, own, known, (name, module))
    for kind in _classes_of(model):
        yield Space.of(kind.__name__, "attribute", kind, None)
        yield from _inner_spaces(kind.__name__, dict(vars(kind)), known)
    for function in _functions_of(model):
        yield from _inner_spaces(function.__name__, (function.__defaults__, function.__kwdefaults__), known)


def _classes_of(model: nn.Module) -> set[type]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return {kind for kind in kinds if not is_foreign(kind.__module__)}


def _functions_of(model: nn.Module) -> list[FunctionType]:
    return [value for kind in _classes_of(model) for value in vars(kind).values() if isinstance(value, FunctionType)]


def _spaces_of_modules(functions: Sequence[FunctionType]) -> Iterator[Space]:
    """Yield the variables of the Python modules of functions, and the contents of these."""
    known: set[int] = set()
    for name, variables in _modules_of(functions).items():
        yield Space.of(name, "variable", variables, None)
        yield from _inner_spaces(name, variables, known)


def _modules_of(functions: Sequence[FunctionType]) -> dict[str, dict[str, Any]]:
    """Return the variables of the Python modules of functions, and of the functions and modules among these, by name."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [function.__globals__ for function in functions]
    while waiting:
        variables = waiting.pop()
        name = str(variables.get("__name__"))
        if name not in found and not is_foreign(name):
            found[name] = variables
            waiting += [value.__globals__ for value in variables.values() if isinstance(value, FunctionType)]
            if any(function.__globals__ is variables for function in functions):
                waiting += [vars(value) for value in variables.values() if isinstance(value, ModuleType)]
    return found


def _inner_spaces(
    owner: str, value: object, known: set[int], module: tuple[str, nn.Module] | None = None
) -> Iterator[Space]:
    """Yield the containers and objects in a container, and those in them, of which those with the ids `known` are left out.

    Outside of a model the objects in containers are left out too: packages keep thousands in tables.
    """
    given = contents_of(value) or {}
    waiting: list[tuple[str, dict[Any, Any]]] = [(owner, given)]
    while waiting:
        owner, contents = waiting.pop()
        for key, item in list(dict.items(contents)):
            inner = contents_of(item)
            if inner is None or id(item) in known or str(key).startswith("__"):
                continue
            is_object = not isinstance(item, CONTAINERS)
            if is_object and module is None and contents is not given:
                continue
            known.add(id(item))
            name = f"{owner}.{key}".removeprefix(".")
            waiting.append((name, inner))
            if isinstance(item, tuple | frozenset):
                continue
            kind = "attribute" if is_object else "entry" if isinstance(item, dict) else "item"
            yield Space.of(name, kind, item if kind == "item" else inner, module)


def _tensors_in(spaces: Sequence[Space]) -> list[Tensor]:
    """Return the tensors in spaces. Other containers in a space are spaces of their own, except tuples, which nobody changes.

    An object outside of the model may lead to all objects of the process: it is not followed.
    """
    waiting, found = [value for space in spaces for value in space.values()], []
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | frozenset):
            waiting += value
    return found


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in parts_of(value) if isinstance(leaf, Tensor)]


def _holds_traced(value: object) -> bool:
    """Return whether a value of a capture is in a value: a proxy of a trace, or a tensor or number of torch.export."""
    return any(
        isinstance(leaf, fx.Proxy | torch.SymInt) or type(leaf).__name__ == "FakeTensor" for leaf in parts_of(value)
    )
