"""The inputs and outputs of models: arguments of forward, batches, and tensors alone or in tuples, lists and dicts."""

import inspect
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from qtoolkit.errors import first_line, with_article

T = TypeVar("T")
Keys = tuple[str | int, ...]  # the keys and positions that lead to a value in nested containers
Args = tuple[object, ...]  # the arguments of a call, by position and by keyword
Kwargs = dict[str, object]

OWN_FOLDER = os.path.dirname(__file__)
# What torch says of a tensor of another shape than an op takes.
OF_SHAPES = re.compile(r"\b(shapes?|sizes?|channels|elements|dimensions?|[2-5]D)\b")


def split(example_inputs: object) -> tuple[Args, Kwargs]:
    """Return example inputs as positional and keyword arguments.

    Example:
        >>> split({"x": 1}), split((1, 2)), split(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


class MisfitError(TypeError, RuntimeError):
    """Inputs are of a type or dtype, or on a device, that a model does not take. torch raises either of the base classes."""


class ShapeMisfitError(MisfitError, ValueError):
    """Inputs are of a shape that a model does not take. torch raises either of the base classes."""


@contextmanager
def naming_misfits(model: nn.Module, inputs: object, what: str) -> Iterator[None]:
    """Let an error of a run say which input is of a type, dtype or shape, or on a device, that the model does not take.

    Example:
        >>> layer, x = nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.float64)
        >>> with naming_misfits(layer, x, "example_inputs do"):
        ...     layer(x)
        Traceback (most recent call last):
        ...
        qtoolkit.model_inputs.MisfitError: example_inputs do not fit the model: 'input' is float64, ...
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, MisfitError) or (isinstance(error, ValueError) and _is_raised_here(error)):
            raise
        said = f"{type(error).__name__}: {first_line(error)}"
        reason = _misfit(model, inputs, in_lookup="indices" in str(error))
        if reason is not None:
            raise MisfitError(f"{what} not fit the model: {reason} ({said}).") from error
        reason = _wrong_shape(model, inputs, error)
        if reason is not None:
            raise ShapeMisfitError(f"{what} not fit the model: {reason} ({said}).") from error
        raise


def _is_raised_here(error: BaseException) -> bool:
    """Return whether this package raised an error: it says itself what is wrong."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(OWN_FOLDER)


def _misfit(model: nn.Module, inputs: object, in_lookup: bool) -> str | None:
    """Return what is wrong with inputs that a model, or its embedding, failed on, and the remedy; None if nothing is seen."""
    arguments = given_arguments(model, inputs)
    if arguments is None:
        return None
    if isinstance(inputs, list):
        return f"a list is one argument, {next(iter(arguments))!r}; write a tuple for the arguments of forward"
    given = [(str(name), leaf) for (name, *_), leaf in leaves(arguments)]
    if given and all(isinstance(leaf, bool | int | float | str | None) for _, leaf in given):
        name, leaf = given[0]
        return f"{name!r} is {leaf!r}, and no input is a tensor; pass the tensors that the model takes in use"
    found = (_misfit_of(f"{name!r}", leaf, model, in_lookup) for name, leaf in given)
    return next((reason for reason in found if reason is not None), None)


def _wrong_shape(model: nn.Module, inputs: object, error: Exception) -> str | None:
    """Return the words for inputs whose shapes a layer of the model, or an op, does not take; None for any other error."""
    if type(error) not in (RuntimeError, ValueError) or not OF_SHAPES.search(str(error)):
        return None
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return None
    given = given_arguments(model, inputs) or {}
    shapes = [f"{name!r} has the shape {_shape(leaf)}" for name, value in given.items() for leaf in tensors_of(value)]
    taken = _failing_layer(model, error.__traceback__)
    return f"{', '.join(shapes)}, {taken}; pass inputs of the shapes that the model takes in use"


def _failing_layer(model: nn.Module, trace: TracebackType | None) -> str:
    """Return in words which layer of a model raised an error, and the shapes that it got."""
    calls = [frame.f_locals for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_name == "_call_impl"]
    names = {module: name for name, module in model.named_modules() if name}
    called = [values for values in calls if values.get("self") in names]
    if not called:
        return "which its forward cannot take"
    layer, shapes = called[-1]["self"], [_shape(tensor) for tensor in tensors_of(called[-1].get("args", ()))]
    return f"from which layer {names[layer]!r}, {with_article(type(layer))}, gets {', '.join(shapes)}, which it cannot take"


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _misfit_of(name: str, value: object, model: nn.Module, in_lookup: bool) -> str | None:
    own = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if not isinstance(value, Tensor):  # of other types nothing is known: they may be what the model takes
        if not hasattr(value, "__array_interface__"):
            return None
        kind = type(value).__name__
        return f"{name} is an array of type {kind}, and layers take tensors; pass torch.as_tensor(array)"
    if own and value.device not in {parameter.device for parameter in own}:
        place = str(own[0].device)
        return f"{name} is on {value.device}, and the model on {place}; pass it with .to({place!r})"
    looks_up = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    fits = value.dtype in {parameter.dtype for parameter in own} or (looks_up and not value.is_floating_point())
    fits = fits or value.is_complex()  # the cast would drop a part of it
    if own and not fits:
        words = _name_of(value.dtype), _name_of(own[0].dtype)
        return f"{name} is {words[0]}, and the model is {words[1]}; pass it with .to(torch.{words[1]})"
    if in_lookup and value.is_floating_point():
        return f"{name} is {_name_of(value.dtype)}, and an embedding looks up whole numbers; pass those with .long()"
    return None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def leaves(value: object, path: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield the values in nested tuples, lists and mappings, each with the keys and positions that lead to it."""
    if isinstance(value, Mapping | tuple | list) and not isinstance(value, torch.Size):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def given_arguments(model: nn.Module, inputs: object) -> Kwargs | None:
    """Return the value of each argument of a model's forward; None where its signature does not take the inputs."""
    try:
        return bind(model, inputs)
    except TypeError:
        return None


def bind(model: nn.Module, inputs: object, what: str = "prepare: example_inputs do", remedy: str = "") -> Kwargs:
    """Return the example value of each argument of a model's forward."""
    return _bound(model, inputs, what, remedy).arguments


def call_arguments(model: nn.Module, example_inputs: object, what: str) -> tuple[Args, Kwargs]:
    """Return example inputs as a call of forward has them: by position where it can be, in the order of forward.

    Example:
        >>> call_arguments(nn.Bilinear(2, 2, 2), {"input2": 2, "input1": 1}, "example_inputs do")
        ((1, 2), {})
    """
    bound = _bound(model, example_inputs, what)
    return bound.args, bound.kwargs


def _bound(model: nn.Module, example_inputs: object, what: str, remedy: str = "") -> inspect.BoundArguments:
    args, kwargs = split(example_inputs)
    signature = inspect.signature(model.forward)
    if (mistaken := _mistaken(example_inputs)) is not None:
        raise TypeError(f"{what} not match {type(model).__name__}.forward{signature}: {mistaken}.")
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{what} not match {type(model).__name__}.forward{signature}: {error}{remedy}.") from None


def _mistaken(given: object) -> str | None:
    """Return what is wrong where a shape or a data loader is passed as inputs, and the remedy; None for anything else."""
    if isinstance(given, DataLoader | Dataset):
        item = "next(iter(loader))" if isinstance(given, DataLoader) else "dataset[0]"
        return f"got {with_article(type(given))}; pass the model's inputs from one batch, as from {item}"
    if not isinstance(given, tuple | list):
        return None
    if isinstance(given, torch.Size) or (len(given) > 1 and all(type(size) is int for size in given)):
        return f"got the shape {tuple(given)}; pass a tensor of it, such as torch.randn({', '.join(map(str, given))})"
    return None


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in a nested value, in order; other values are ignored."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def with_tensors(value: object, tensors: Iterator[Tensor]) -> Any:
    """Return a nested value with other tensors, in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: with_tensors(part, tensors) for key, part in value.items()}
    if not isinstance(value, tuple | list):
        return value
    parts = [with_tensors(part, tensors) for part in value]
    return parts if isinstance(value, list) else tuple(parts)


def clone_tensors(value: T) -> T:
    """Return a nested value with new containers and clones of its tensors, which later in-place ops do not change."""
    cloned: T = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, value)
    return cloned


def copy_containers(value: object) -> Any:
    """Return a nested value with new lists and dicts: a graph's node has immutable ones."""
    if type(value) is tuple:
        return tuple(map(copy_containers, value))
    if isinstance(value, list):
        return list(map(copy_containers, value))
    return {key: copy_containers(item) for key, item in value.items()} if isinstance(value, dict) else value
