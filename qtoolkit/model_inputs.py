"""What models take and return: example inputs, batches, and tensors alone or in tuples, lists and dicts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn


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


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: model(**batch) for a mapping, model(*batch) for a tuple or list, else model(batch)."""
    args, kwargs = split(tuple(batch) if isinstance(batch, list) else batch)
    return model(*args, **kwargs)


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
