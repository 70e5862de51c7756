"""What a forward assigns while it is traced: a graph records no assignment, and what holds traced values gets its own back.

An assignment makes no difference where no forward reads what an earlier one has left: a map that is kept for plots, a mean that
is written before it is read, a cache.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from qtoolkit.model_state import parts_of
from qtoolkit.op_kinds.rules import CASTS

OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, which no forward assigns
# Packages that keep no values of a forward.
FOREIGN = frozenset(("numpy", "qtoolkit", "torch", *sys.stdlib_module_names))
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


@contextmanager
def undone_assignments(model: nn.Module, check: bool = True) -> Iterator[None]:
    """Capture a model in a block; at its end the model, and what else holds values of the capture, is as before it.

    With `check` it raises RuntimeError if the forward reads a tensor that an earlier one has left, and assigns another one.
    """
    assignments = Assignments(model)
    try:
        with assignments.reads if check and assignments.reads.watched else nullcontext():
            yield
        if check:
            assignments.check()
    finally:
        assignments.undo()


@dataclass(frozen=True, eq=False)
class Space:
    """A dict or a list to which a forward may assign."""

    owner: str  # its dotted name
    kind: str  # of what is in it, in words
    held: Any
    before: Any  # a copy of it before the forward

    @classmethod
    def of(cls, owner: str, kind: str, held: Any) -> "Space":
        """Return a dict or list with what is in it now."""
        return cls(owner, kind, held, dict(held) if isinstance(held, dict) else list(held))

    def assigned(self) -> list[tuple[Any, object, object]]:
        """Return the keys that got a traced value, each with what a forward has read there, and the one of now."""
        now = self.held.items() if isinstance(self.held, dict) else enumerate(self.held)
        pairs = ((key, self._before(key), value) for key, value in now)
        return [pair for pair in pairs if pair[1] is not pair[2] and _holds_traced((pair[0], pair[2]))]

    def _before(self, key: Any) -> object:
        if isinstance(self.before, dict):
            return self.before.get(key)
        return self.before[key] if key < len(self.before) else self.before  # a forward may read the end of a list

    def values(self) -> list[object]:
        """Return what was there, without what torch keeps in every module."""
        if isinstance(self.before, list):
            return self.before
        return [value for key, value in self.before.items() if key not in OF_TORCH]

    def undo(self) -> None:
        """Put what was there before in place of traced values."""
        keys = [key for key, _, _ in self.assigned()]
        if keys and isinstance(self.held, list):
            self.held[:] = self.before
            return
        for key in keys:
            if key in self.before:
                self.held[key] = self.before[key]
            else:
                del self.held[key]


class Reads(TorchFunctionMode):
    """Notes which of some tensors a function or method of torch takes, but for one that asks for no values."""

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
    """What a forward may assign to, and the tensors of earlier forwards that it reads."""

    def __init__(self, model: nn.Module) -> None:
        self.spaces = [*_spaces(model), *_spaces_of_modules(_functions_of(model))]
        watched = [space for space in self.spaces if space.kind not in ("buffer", "variable")]
        self.reads = Reads(_tensors([value for space in watched for value in space.values()]))

    def check(self) -> None:
        """Raise RuntimeError if a traced value was assigned in place of a tensor that the forward reads.

        A cast of the tensor itself is a local value: each forward makes it anew. A buffer is part of the model's state.
        """
        for space in self.spaces:
            for key, before, value in space.assigned():
                for tensor in _tensors(before):
                    if not self._is_cast_of(tensor, value) and (space.kind == "buffer" or self._is_read(tensor, value)):
                        name = f"{space.owner}.{key}".removeprefix(".")
                        raise RuntimeError(
                            f"the forward reads and assigns to {space.kind} {name!r}, which a graph does not record; write "
                            f"into the {space.kind} with copy_ or add_, or assign to a local variable."
                        )

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

    def undo(self) -> None:
        """Give all that holds traced values its values of before."""
        for space in self.spaces:
            space.undo()


def _spaces(model: nn.Module) -> Iterator[Space]:
    """Yield what a model's forward may assign to: attributes, buffers, and the dicts and lists that these and classes hold."""
    known: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # a leaf module
            continue
        yield Space.of(name, "attribute", vars(module))
        yield Space.of(name, "buffer", module._buffers)
        yield from _containers(name, {k: v for k, v in vars(module).items() if k not in OF_TORCH}, known)
    for kind in _classes_of(model):
        yield from _containers(kind.__name__, vars(kind), known)
    for function in _functions_of(model):
        yield from _containers(function.__name__, (function.__defaults__, function.__kwdefaults__), known)


def _classes_of(model: nn.Module) -> set[type]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return {kind for kind in kinds if not _is_foreign(kind.__module__)}


def _functions_of(model: nn.Module) -> list[FunctionType]:
    return [value for kind in _classes_of(model) for value in vars(kind).values() if isinstance(value, FunctionType)]


def _spaces_of_modules(functions: Sequence[FunctionType]) -> Iterator[Space]:
    """Yield the variables of the Python modules of functions, and the dicts and lists among them."""
    known: set[int] = set()
    for name, variables in _modules_of(functions).items():
        yield Space.of(name, "variable", variables)
        yield from _containers(name, variables, known)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN


def _modules_of(functions: Sequence[FunctionType]) -> dict[str, dict[str, Any]]:
    """Return the variables of the Python modules of functions, and of the functions and modules among these, by name."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [function.__globals__ for function in functions]
    while waiting:
        variables = waiting.pop()
        name = str(variables.get("__name__"))
        if name not in found and not _is_foreign(name):
            found[name] = variables
            waiting += [value.__globals__ for value in variables.values() if isinstance(value, FunctionType)]
            if any(function.__globals__ is variables for function in functions):
                waiting += [vars(value) for value in variables.values() if isinstance(value, ModuleType)]
    return found


def _containers(owner: str, value: object, known: set[int]) -> Iterator[Space]:
    """Yield the dicts and lists in a container, and those in them, of which those with the ids `known` are left out."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple | list) else ()
    for key, item in list(items):
        if isinstance(item, dict | list) and id(item) not in known:
            known.add(id(item))
            yield Space.of(f"{owner}.{key}".removeprefix("."), "entry" if isinstance(item, dict) else "item", item)
            yield from _containers(f"{owner}.{key}", item, known)
        elif isinstance(item, tuple):
            yield from _containers(f"{owner}.{key}", item, known)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in parts_of(value) if isinstance(leaf, Tensor)]


def _holds_traced(value: object) -> bool:
    """Return whether a value of a capture is in a value: a proxy of a trace, or a tensor or number of torch.export."""
    return any(
        isinstance(leaf, fx.Proxy | torch.SymInt) or type(leaf).__name__ == "FakeTensor" for leaf in parts_of(value)
    )
