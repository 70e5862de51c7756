"""Protection of the user's model: its check, a copy to change, its state restored after an error, its modes after a run."""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from qtoolkit.wrapped import unwrapped

M = TypeVar("M", bound=nn.Module)

# Packages whose functions and objects keep no values of a forward.
FOREIGN = frozenset(("numpy", "qtoolkit", "torch", *sys.stdlib_module_names))
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# What to do, by the public function, if copy.deepcopy cannot be made to work.
REMEDIES = {"prepare": ", or pass inplace=True and no example_inputs", "convert": ""}


def check_module(model: object, what: str, argument: str = "model") -> nn.Module:
    """Return the model in an argument of the public function `what`, without a wrapper; TypeError unless it is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: {argument} must be a torch.nn.Module, got {type(model).__name__}.")
    return unwrapped(model)


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's first parameter or buffer; None if it has none."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)


def deepcopy_model(model: M, memo: dict[int, object] | None = None, what: str = "prepare") -> M:
    """Return a deep copy of a model for the public function `what`; TypeError if it cannot be copied."""
    memo = {**_detached_attributes(model), **(memo or {})}
    try:
        copied = copy.deepcopy(model, memo)
        _copy_attributes_of_parameters(model, memo)
    except Exception as error:
        raise TypeError(
            f"{what}: the model cannot be copied ({type(error).__name__}: {error}); make copy.deepcopy(model) work"
            f"{REMEDIES.get(what, ', or pass inplace=True')}."
        ) from error
    keep_trained(copied)
    return copied


def _copy_attributes_of_parameters(model: nn.Module, memo: dict[int, object]) -> None:
    """Give the copies of parameters the attributes that the parameters have: Parameter.__deepcopy__ drops them.

    Training scripts tell by them how a parameter is trained (`weight._no_weight_decay = True`). Attributes that
    torch.compile sets are left out.
    """
    for parameter in model.parameters():
        own = {name: value for name, value in vars(parameter).items() if not name.startswith("_dynamo_")}
        copied = memo.get(id(parameter), parameter)
        if own and copied is not parameter:
            vars(copied).update({**copy.deepcopy(own, memo), **vars(copied)})


def keep_trained(copied: nn.Module) -> None:
    """Let the parameters of scripted modules be trained: copy.deepcopy makes them results of a clone, without gradients."""
    for module in copied.modules():
        if isinstance(module, torch.jit.ScriptModule):
            for parameter in module.parameters():
                if not parameter.is_leaf:
                    parameter.detach_().requires_grad_()


def _detached_attributes(model: nn.Module) -> dict[int, Tensor]:
    """Return a detached copy of each computed tensor in the attributes, by its id: copy.deepcopy refuses these.

    The hooks of torch.nn.utils.prune, for example, set a weight that they compute; a forward may keep what it computed.
    """
    own = [
        {k: v for k, v in vars(module).items() if k not in ("_modules", "_parameters")} for module in model.modules()
    ]
    tensors = [part for part in parts_of(own) if isinstance(part, Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def is_foreign(module: str) -> bool:
    """Return whether a module of Python, by its name, is of a package that keeps no values of a forward."""
    return module.partition(".")[0] in FOREIGN


def contents_of(value: object) -> dict[Any, Any] | None:
    """Return what is in a container, or the attributes of an object of a user's class; None for any other value.

    The keys are the container's own, places in it, or in a set the identities of its items.
    """
    if isinstance(value, fx.Proxy):  # which may pass for a container
        return None
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        return {id(item): item for item in value}
    if type(value) is not SimpleNamespace and is_foreign(str(type(value).__module__)):
        return None
    has_own_rules = isinstance(value, Tensor | nn.Module | type | FunctionType | ModuleType)
    held = None if has_own_rules else getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def parts_of(value: object) -> Iterator[object]:
    """Yield the contents of nested containers and objects, which may contain themselves; another value is its own part."""
    waiting, known = [value], set[int]()
    while waiting:
        part = waiting.pop()
        contents = contents_of(part)
        if contents is None:
            yield part
        elif id(part) not in known:
            known.add(id(part))
            waiting += dict.values(contents)  # a class of dicts may make new values


@contextmanager
def unchanged_on_error(model: nn.Module, parameters: bool = False) -> Iterator[None]:
    """Restore a model if the block raises: its submodules, their types, modes and attributes, and the values of buffers.

    With `parameters` it restores these too, from a copy made before the block: for quantizers, not for whole models.
    The dicts of its modules stay the same objects, so that handles of hooks remain valid.
    """
    states = [(module, type(module), dict(vars(module)), _contents(vars(module))) for module in model.modules()]
    tensors = [*model.buffers(), *(model.parameters() if parameters else ())]
    try:
        with values_unchanged_on_error(tensors):
            yield
    except BaseException:
        for module, kind, state, contents in states:
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()
            vars(module).update(state)
            for name, content in contents.items():
                state[name].clear()
                state[name].update(content)
        raise


@contextmanager
def changing(model: M, inplace: bool, what: str) -> Iterator[M]:
    """Give the block the model to change: itself with `inplace`, restored if the block raises; otherwise a copy."""
    with unchanged_on_error(model) if inplace else nullcontext():
        yield model if inplace else deepcopy_model(model, what=what)


@contextmanager
def values_unchanged_on_error(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors if the block raises. They are copied before the block."""
    put_back = _values_of(tensors)
    try:
        yield
    except BaseException:
        put_back()
        raise


@contextmanager
def values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors after the block. They are copied before it."""
    put_back = _values_of(tensors)
    try:
        yield
    finally:
        put_back()


def _values_of(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Copy the values of tensors, and return a function that restores them."""
    values = [_elements(tensor).detach().clone() for tensor in tensors]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            elements = _elements(tensor)
            if elements.shape == value.shape:
                elements.copy_(value)
            else:  # the first input or a state dict has given a quantizer its number of channels
                tensor.data = value

    return put_back


def _elements(tensor: Tensor) -> Tensor:
    """Return a view with each element of an expanded tensor once: torch writes into no element that stands for several."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def _contents(state: dict[str, object]) -> dict[str, dict[object, object]]:
    # A module stores hooks, submodules and parameters in dicts. Most are empty, and slow to copy.
    return {name: dict(value) if value else {} for name, value in state.items() if isinstance(value, dict)}


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of the default generators of torch (on the CPU), of Python's `random` and of NumPy, if it is loaded.

    Two states are equal if no generator has drawn between them.
    """

    of_torch: Tensor
    of_python: tuple[object, ...]
    of_numpy: object

    @classmethod
    def now(cls) -> Self:
        """Return the current states."""
        of_numpy = None
        if "numpy" in sys.modules:
            name, keys, *rest = import_module("numpy.random").get_state()
            of_numpy = (name, tuple(keys.tolist()), *rest)
        return cls(torch.get_rng_state(), random.getstate(), of_numpy)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.of_torch, other.of_torch)
            and (self.of_python, self.of_numpy) == (other.of_python, other.of_numpy)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            import_module("numpy.random").set_state(self.of_numpy)


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy, and torch (on the CPU and the model's devices) after the block."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    before = RandomState.now()
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        before.restore()


@contextmanager
def removing(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks, given by the handles of their registration, at the end of a `with` block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a `with` block. Then each module is in its own mode again, frozen batch norms included."""
    with attribute_kept(model.modules(), "training"):
        model.eval()
        yield


@contextmanager
def attribute_kept(owners: Iterable[object], name: str) -> Iterator[None]:
    """Restore an attribute of each owner after the block."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        yield
    finally:
        for owner, value in before:
            setattr(owner, name, value)


def check_numbers(what: str, name: str, value: object) -> None:
    """Raise TypeError unless an entry of a state dict is a dense tensor of floating-point numbers of 2 bytes or more."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: {name!r} must be a tensor, got {type(value).__name__}.")
    if not value.is_floating_point() or value.dtype.itemsize < 2 or value.layout is not torch.strided or value.is_meta:
        dtype, layout = (str(each).removeprefix("torch.") for each in (value.dtype, value.layout))
        raise TypeError(
            f"{what}: {name!r} must be a dense tensor of floating-point numbers with values, got {dtype}, "
            f"{layout}, on {value.device}."
        )
