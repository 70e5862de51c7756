"""BatchCache: the values of many batches, in memory up to a limit, the rest in temporary files."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

T = TypeVar("T")


class BatchCache(ExitStack, Generic[T]):
    """A list of nested values with tensors, in a `with` block; afterwards its files are removed.

    Other values than tensors, and containers unknown to torch's pytrees, stay in memory unchanged. Up to `limit` bytes of
    tensors are in memory on the CPU (currently `bytes`); items are returned on `device`.

    Example:
        >>> with BatchCache(limit=40, device=torch.device("cpu")) as cache:
        ...     for _ in range(3):
        ...         cache.append({"x": torch.ones(8)})
        ...     cache[0] = {"x": torch.zeros(2)}
        ...     len(cache), cache.bytes, cache[0]["x"], cache[2]["x"].sum()
        (3, 8, tensor([0., 0.]), tensor(8.))
    """

    def __init__(self, limit: float, device: torch.device) -> None:
        super().__init__()
        self.limit, self.device, self.bytes = limit, device, 0
        self._items: list[_Item] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.callback(self._items.clear)

    def __len__(self) -> int:
        return len(self._items)

    def append(self, value: T) -> None:
        """Add an item."""
        self._items.append(self._kept(value, len(self)))

    def __setitem__(self, index: int, value: T) -> None:
        before = self._items[index]
        if isinstance(before.tensors, list):
            self.bytes -= _size(before.tensors)
        del before
        self._items[index] = self._kept(None, index)  # its memory is free before the new value takes some
        self._items[index] = self._kept(value, index)

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < len(self._items):
            raise IndexError(index)
        item = self._items[index]
        tensors = iter(torch.load(item.tensors) if isinstance(item.tensors, Path) else item.tensors)
        leaves = [next(tensors).to(self.device) if leaf is Tensor else leaf for leaf in item.leaves]
        value: T = tree_unflatten(leaves, item.form)
        return value

    def _kept(self, value: T | None, index: int) -> "_Item":
        found, form = tree_flatten(value, lambda part: isinstance(part, torch.Size))  # which would become a tuple
        tensors = [_alone(leaf.detach().cpu()) for leaf in found if isinstance(leaf, Tensor)]
        leaves, size = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in found], _size(tensors)
        if self.bytes + size <= self.limit:
            self.bytes += size
            return _Item(form, leaves, tensors)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="qtoolkit-", ignore_cleanup_errors=True)
            self.callback(self._folder.cleanup)
        file = Path(self._folder.name, f"{index}.pt")
        torch.save(tensors, file)
        return _Item(form, leaves, file)


@dataclass(frozen=True)
class _Item:
    """The structure of a value, its leaves with `Tensor` in place of tensors, and the tensors or their file."""

    form: TreeSpec
    leaves: list[object]
    tensors: list[Tensor] | Path


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor without the rest of a larger memory that it is a view of, which would be kept and written too."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
