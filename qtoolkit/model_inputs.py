"""What models take and return: tensors, alone or in tuples, lists and dicts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in order; what is no tensor is passed over.

    Example:
        >>> tensors_of({"a": torch.tensor(1), "b": (torch.tensor(2), None)})
        [tensor(1), tensor(2)]
    """
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def copy_of(value: Any) -> Any:
    """Return a value with copies of its tensors: later ops may work in place."""
    return fx.node.map_aggregate(value, lambda v: v.clone() if isinstance(v, Tensor) else v)
