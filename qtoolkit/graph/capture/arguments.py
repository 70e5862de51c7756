"""Arguments of a model's forward: which are fixed at tracing, and what the example inputs give to the others."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from qtoolkit.errors import check_known

# Defaults that Python decides on. Others (a tensor, a tuple) are values like those that a caller passes.
FIXED_TYPES = (bool, int, float, str, type(None))


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as positional and keyword arguments: a tuple, a mapping of keywords, or one input.

    Example:
        >>> split({"x": 1}), split((1, 2)), split(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def bind(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Return what example inputs give to each argument of a model's forward.

    Raises:
        TypeError: They do not fit its signature.
    """
    args, kwargs = split(example_inputs)
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"prepare: example_inputs do not fit {type(model).__name__}.forward{signature}: {error}."
        ) from None


def fixed_arguments(model: nn.Module, concrete_args: Mapping[str, Any] | None, example_inputs: Any) -> dict[str, Any]:
    """Return the arguments that are fixed at tracing: those the user fixes, and those left at a default that Python decides on.

    Raises:
        ValueError: A key of `concrete_args` is no argument of forward.
        TypeError: The example inputs do not fit.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in concrete_args or {}:
        check_known("argument of forward in prepare's concrete_args", name, parameters)
    given = {} if example_inputs is None else bind(model, example_inputs)
    values = {name: given.get(name, p.default) for name, p in parameters.items()}
    fixed = {name: value for name, value in values.items() if _fixes(value, name in given)}
    return {**fixed, **(concrete_args or {})}


def _fixes(value: Any, given: bool) -> bool:
    # A number that the user passes is an input; None, a flag or a name is a choice of a way through the forward.
    return isinstance(value, bool | str | type(None)) if given else isinstance(value, FIXED_TYPES)
