"""What models take and return: arguments of forward, batches, and tensors alone or in tuples, lists and dicts."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from qtoolkit.errors import check_known

# Types of defaults that Python branches on. Other defaults, such as a tensor or a tuple, stay inputs of the graph.
FIXED_TYPES = (bool, int, float, str, type(None))


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as positional and keyword arguments.

    Args:
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one input.

    Example:
        >>> split({"x": 1}), split((1, 2)), split(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def run_batch(model: nn.Module, batch: Any, what: str = "calibrate") -> Any:
    """Run a model on a batch: model(**batch) for a mapping, model(*batch) for a tuple or list, else model(batch).

    Args:
        model: The model.
        batch: The batch.
        what: The public function, for the error.

    Raises:
        TypeError: The batch does not match the signature of forward, such as a data loader's (images, labels).
    """
    inputs = tuple(batch) if isinstance(batch, list) else batch
    args, kwargs = split(inputs)
    try:
        return model(*args, **kwargs)
    except TypeError:  # not checked before: hooks may change the inputs
        first = repr(next(iter(kwargs), 0))
        remedy = f"; pass forward=lambda model, batch: model(batch[{first}]) with the items that the model takes"
        bind(model, inputs, f"{what}: a batch does", remedy)
        raise


def bind(
    model: nn.Module, example_inputs: Any, what: str = "prepare: example_inputs do", remedy: str = ""
) -> dict[str, Any]:
    """Return the example value of each argument of a model's forward.

    Args:
        model: The model.
        example_inputs: As for `split`.
        what: How the error begins.
        remedy: How the error ends.

    Raises:
        TypeError: The example inputs do not match the signature.
    """
    return _bound(model, example_inputs, what, remedy).arguments


def call_arguments(model: nn.Module, example_inputs: Any, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as a call of forward has them: by position where it can be, in the order of forward.

    Args:
        model: The model.
        example_inputs: As for `split`.
        what: How the error begins.

    Raises:
        TypeError: The example inputs do not match the signature.

    Example:
        >>> call_arguments(nn.Bilinear(2, 2, 2), {"input2": 2, "input1": 1}, "example_inputs do")
        ((1, 2), {})
    """
    bound = _bound(model, example_inputs, what)
    return bound.args, bound.kwargs


def _bound(model: nn.Module, example_inputs: Any, what: str, remedy: str = "") -> inspect.BoundArguments:
    args, kwargs = split(example_inputs)
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{what} not match {type(model).__name__}.forward{signature}: {error}{remedy}.") from None


def fixed_arguments(model: nn.Module, concrete_args: Mapping[str, Any] | None, example_inputs: Any) -> dict[str, Any]:
    """Return the values of the arguments that are fixed at tracing.

    These are `concrete_args`, and arguments whose example value or default is a flag, a string or None; a default that is a
    number is fixed too.

    Raises:
        ValueError: A key of `concrete_args` is not an argument of forward.
        TypeError: The example inputs do not match the signature of forward.
    """
    parameters = inspect.signature(model.forward).parameters
    if not isinstance(concrete_args, Mapping | None):
        raise TypeError(f"prepare: concrete_args must be a dict of arguments of forward, got {concrete_args!r}.")
    for name in concrete_args or {}:
        check_known("argument of forward in prepare's concrete_args", name, parameters)
    given = {} if example_inputs is None else bind(model, example_inputs)
    values = {name: given.get(name, p.default) for name, p in parameters.items()}
    fixed = {name: value for name, value in values.items() if _is_fixed(value, name in given)}
    return {**fixed, **(concrete_args or {})}


def _is_fixed(value: Any, given: bool) -> bool:
    # A number that the user passes stays an input. Flags, strings and None select a branch of the forward.
    return isinstance(value, bool | str | type(None)) if given else isinstance(value, FIXED_TYPES)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in order; other values are ignored.

    Example:
        >>> tensors_of({"a": torch.tensor(1), "b": (torch.tensor(2), None)})
        [tensor(1), tensor(2)]
    """
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a nested value with other tensors, in the order of `tensors_of`.

    Example:
        >>> with_tensors({"a": torch.tensor(1), "b": (torch.tensor(2), None)}, iter([3, 4]))
        {'a': 3, 'b': (4, None)}
    """
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: with_tensors(part, tensors) for key, part in value.items()}
    if not isinstance(value, tuple | list):
        return value
    parts = [with_tensors(part, tensors) for part in value]
    return parts if isinstance(value, list) else tuple(parts)


def clone_tensors(value: Any) -> Any:
    """Return a nested value with clones of its tensors, which later in-place ops do not change."""
    return fx.node.map_aggregate(value, lambda v: v.clone() if isinstance(v, Tensor) else v)


def copy_containers(value: Any) -> Any:
    """Return a nested value with new lists and dicts: those of a graph's node are immutable."""
    if type(value) is tuple:
        return tuple(map(copy_containers, value))
    if isinstance(value, list):
        return list(map(copy_containers, value))
    return {key: copy_containers(item) for key, item in value.items()} if isinstance(value, dict) else value
