"""BatchCache: the values of many batches, in memory up to a limit, beyond it in temporary files."""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import fx

from qtoolkit.model_inputs import tensors_of


class BatchCache:
    """A list of nested values with tensors, in a `with` block; afterwards its files are removed.

    Args:
        limit: Bytes that are kept in memory, on the CPU.
        device: Where the tensors of an item are returned.

    Example:
        >>> with BatchCache(limit=40, device=torch.device("cpu")) as cache:
        ...     for _ in range(3):
        ...         cache.append({"x": torch.ones(8)})
        ...     len(cache), cache.bytes, cache[2]["x"].sum()
        (3, 32, tensor(8.))
    """

    def __init__(self, limit: float, device: torch.device) -> None:
        self.limit, self.device, self.bytes = limit, device, 0
        self._items: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def append(self, value: Any) -> None:
        """Add an item."""
        value = _moved(value, torch.device("cpu"))
        size = sum(tensor.nbytes for tensor in tensors_of(value))
        if self.bytes + size <= self.limit:
            self.bytes += size
            self._items.append(value)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="qtoolkit-", ignore_cleanup_errors=True)
        file = Path(self._folder.name, f"{len(self._items)}.pt")
        torch.save(value, file)
        self._items.append(file)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self._items):
            raise IndexError(index)
        item = self._items[index]
        loaded = torch.load(item, weights_only=False) if isinstance(item, Path) else item  # its own file
        return _moved(loaded, self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._items.clear()
        if self._folder is not None:
            self._folder.cleanup()


def _moved(value: Any, device: torch.device) -> Any:
    return fx.node.map_aggregate(value, lambda v: v.detach().to(device) if isinstance(v, torch.Tensor) else v)
