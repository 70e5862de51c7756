"""The order of a model, its inputs and a path in public functions: their types tell them apart in any other order."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


def in_any_order(**roles: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let the first arguments of a function be given in any order: they are told apart by their types.

    The order of all functions is model, inputs, path. Earlier versions had another one in some of them.

    Args:
        **roles: The names of the arguments for "model" (a module), "path" (text, a path or an onnx.ModelProto) and "inputs"
            (anything else), in the order of the function.

    Example:
        >>> @in_any_order(model="model", inputs="example_inputs", path="path")
        ... def write(model, example_inputs, path):
        ...     return type(model).__name__, example_inputs, path
        >>> write("model.onnx", nn.ReLU(), 3), write(nn.ReLU(), "model.onnx", example_inputs=3)
        (('ReLU', 3, 'model.onnx'), ('ReLU', 3, 'model.onnx'))
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with sorted arguments."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            sorted_args, named = _sorted(roles, args, kwargs)
            return function(*sorted_args, **named)

        return call

    return decorate


def _sorted(
    roles: Mapping[str, str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call with those of roles by name; as they are if their types do not tell them apart."""
    first, others = args[: len(roles)], args[len(roles) :]
    found = {roles.get(_role_of(value), ""): value for value in first}
    has_model = "model" not in roles or roles["model"] in {**found, **kwargs}  # if not, the function says so
    if len(found) < len(first) or "" in found or found.keys() & kwargs.keys() or not has_model:
        return args, kwargs
    if not others:
        return (), {**found, **kwargs}
    return (*(found[name] for name in roles.values()), *others), kwargs


def _role_of(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "model"
    is_path = isinstance(value, str | os.PathLike) or type(value).__name__ == "ModelProto"
    return "path" if is_path else "inputs"
