"""The types and functions of `QConfigMapping.set_object_type` as text, and back without importing anything."""

import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import nn

Kind = type | Callable[..., object]


def path_of(kind: Kind) -> str:
    """Return the import path of a type, function or tensor method, in the form module:name."""
    # The __module__ of a tensor method is None: its class, __objclass__, has one.
    owner = getattr(kind, "__objclass__", kind) if getattr(kind, "__module__", None) is None else kind
    if owner is not kind:
        return f"{owner.__module__}:{owner.__qualname__}.{kind.__name__}"
    # The qualified name of some functions, such as torch.add, is not their name in the module.
    is_global = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return f"{kind.__module__}:{kind.__name__ if is_global else kind.__qualname__}"


def kind_at(path: str, types: Iterable[Kind]) -> Kind:
    """Return the object at a path among the types and functions of torch, `operator`, qtoolkit and the caller; else ValueError.

    Example:
        >>> kind_at("torch.nn:Conv2d", ())
        <class 'torch.nn.modules.conv.Conv2d'>
    """
    known = {**_known_kinds(), **{path_of(kind): kind for kind in types}}
    if path not in known:
        raise ValueError(
            f"{path!r} is no module type or function of torch, torch.nn, operator or qtoolkit.nn, and no method of "
            f"torch.Tensor; pass your own in `types`, such as types=[MyLayer]."
        )
    return known[path]


@cache
def _known_kinds() -> dict[str, Kind]:
    """Return the types and functions of torch, torch.nn, `operator` and qtoolkit.nn, by `path_of` and by public name."""
    modules = [
        module for name, module in sys.modules.items() if f"{name}.".startswith("torch.nn.") or name == "qtoolkit.nn"
    ]
    owners = {f"{module.__name__}:": vars(module) for module in (torch, operator, *modules)}
    owners["torch:Tensor."] = dict(inspect.getmembers(torch.Tensor))
    public = {
        f"{owner}{name}": value
        for owner, members in owners.items()
        for name, value in members.items()
        if (issubclass(value, nn.Module) if isinstance(value, type) else inspect.isroutine(value))
    }
    return {**{path_of(kind): kind for kind in public.values()}, **public}
