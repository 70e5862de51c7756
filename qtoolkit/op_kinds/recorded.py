"""Functions that tracing puts into a graph, to run with the model."""

from collections import OrderedDict
from collections.abc import Iterable, Sized
from importlib import import_module
from typing import Any

import torch


def check_size(value: Any, expected: Any, where: str) -> None:
    """Raise ValueError where a decision that tracing took by the example inputs would now be another one."""
    if (bool(value) if isinstance(expected, bool) else value) != expected:
        raise ValueError(
            f"this model was prepared for inputs of other sizes: it decides at {where}, by {expected!r} then, {value!r} now. "
            f"Call qtoolkit.prepare with example_inputs of these sizes, or keep that submodule whole with skip."
        )


def check_none(value: Any, message: str) -> None:
    """Raise ValueError where an argument that was fixed at None is given."""
    if value is not None:
        raise ValueError(f"{message}: pass it in example_inputs of qtoolkit.prepare, so that it stays an argument.")


def call_scripted(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function that torch.jit.script has compiled: it has no name of its own that a pickle could hold."""
    return getattr(import_module(module), name)(*args, **kwargs)


def length_of(value: Sized) -> int:
    """Return how many items a value has."""
    return len(value)


def items_of(value: Iterable[Any]) -> list[Any]:
    """Return a value's items in order: those of a dict, or of a view of one, have no number."""
    return list(value)


def set_item(tensor: Any, index: Any, value: Any) -> Any:
    """Write into a tensor, and return it."""
    tensor[index] = value
    return tensor


# What a pickle, which is traced again when it is loaded, must not run then.
RECORDED = (check_size, check_none, call_scripted, length_of, items_of, set_item)
# What no runtime computes with: checks, and values put together or taken apart.
BOOKKEEPING = (check_size, check_none, length_of, items_of, torch._assert, getattr, OrderedDict)
