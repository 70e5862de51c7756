"""Arguments of a model's forward: which are fixed at tracing, and the example values of the others."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from qtoolkit.errors import check_known
from qtoolkit.model_inputs import split

# Types of defaults that Python branches on. Other defaults, such as a tensor or a tuple, stay inputs of the graph.
FIXED_TYPES = (bool, int, float, str, type(None))


def bind(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Return the example value of each argument of a model's forward.

    Raises:
        TypeError: The example inputs do not match the signature.
    """
    args, kwargs = split(example_inputs)
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"prepare: example_inputs do not match {type(model).__name__}.forward{signature}: {error}."
        ) from None


def fixed_arguments(model: nn.Module, concrete_args: Mapping[str, Any] | None, example_inputs: Any) -> dict[str, Any]:
    """Return the values of the arguments that are fixed at tracing.

    These are `concrete_args`, and arguments whose example value or default is a flag, a string or None; a default that is a
    number is fixed too.

    Raises:
        ValueError: A key of `concrete_args` is not an argument of forward.
        TypeError: The example inputs do not match the signature of forward.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in concrete_args or {}:
        check_known("argument of forward in prepare's concrete_args", name, parameters)
    given = {} if example_inputs is None else bind(model, example_inputs)
    values = {name: given.get(name, p.default) for name, p in parameters.items()}
    fixed = {name: value for name, value in values.items() if _is_fixed(value, name in given)}
    return {**fixed, **(concrete_args or {})}


def _is_fixed(value: Any, given: bool) -> bool:
    # A number that the user passes stays an input. Flags, strings and None select a branch of the forward.
    return isinstance(value, bool | str | type(None)) if given else isinstance(value, FIXED_TYPES)
