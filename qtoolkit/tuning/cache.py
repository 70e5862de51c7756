"""BatchCache: the values of many batches, in memory up to a limit, beyond it in temporary files."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class BatchCache(AbstractContextManager["BatchCache"]):
    """A list of nested values with tensors, in a `with` block; afterwards its files are removed.

    Other values than tensors, and containers of other types than tuples, lists and dicts, stay in memory as they are.

    Args:
        limit: Bytes of tensors that are kept in memory, on the CPU.
        device: Where the tensors of an item are returned.

    Attributes:
        bytes: Bytes of tensors that are in memory now.

    Example:
        >>> with BatchCache(limit=40, device=torch.device("cpu")) as cache:
        ...     for _ in range(3):
        ...         cache.append({"x": torch.ones(8)})
        ...     cache[0] = {"x": torch.zeros(2)}
        ...     len(cache), cache.bytes, cache[0]["x"], cache[2]["x"].sum()
        (3, 8, tensor([0., 0.]), tensor(8.))
    """

    def __init__(self, limit: float, device: torch.device) -> None:
        self.limit, self.device, self.bytes = limit, device, 0
        self._items: list[_Item] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def append(self, value: Any) -> None:
        """Add an item."""
        self._items.append(self._kept(value, len(self)))

    def __setitem__(self, index: int, value: Any) -> None:
        before = self._items[index]
        if isinstance(before.tensors, list):
            self.bytes -= _size(before.tensors)
        self._items[index] = _Item(None, [])  # its memory is free before the new value takes some
        self._items[index] = self._kept(value, index)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self._items):
            raise IndexError(index)
        item = self._items[index]
        tensors = torch.load(item.tensors) if isinstance(item.tensors, Path) else item.tensors
        return _mapped(item.form, lambda v: tensors[v.place].to(self.device) if isinstance(v, _Place) else v)

    def _kept(self, value: Any, index: int) -> "_Item":
        tensors: list[Tensor] = []

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensors.append(_alone(leaf.detach().cpu()))
            return _Place(len(tensors) - 1)

        form, size = _mapped(value, placed), _size(tensors)
        if self.bytes + size <= self.limit:
            self.bytes += size
            return _Item(form, tensors)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="qtoolkit-", ignore_cleanup_errors=True)
        file = Path(self._folder.name, f"{index}.pt")
        torch.save(tensors, file)
        return _Item(form, file)

    def __exit__(self, *_: object) -> None:
        self._items.clear()
        if self._folder is not None:
            self._folder.cleanup()


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in an item."""

    place: int


@dataclass(frozen=True)
class _Item:
    """A value with places instead of tensors, and the tensors or the file that has them."""

    form: Any
    tensors: list[Tensor] | Path


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor without the rest of the memory of which it is a view, which would be kept, and written, too."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a value with its leaves replaced. Unlike that of torch.fx, it keeps the types of other containers."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(part, function) for part in value)
    if type(value) is dict:
        return {key: _mapped(part, function) for key, part in value.items()}
    return function(value)
