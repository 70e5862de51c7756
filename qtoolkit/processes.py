"""The processes of torch.distributed: how many there are, errors that all of them raise, tensors that are sharded over them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, distributed

from qtoolkit.errors import some
from qtoolkit.running import running

T = TypeVar("T")


def ranks() -> int:
    """Return the number of processes in the default group; 1 without a group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in the default group; 0 without a group."""
    return distributed.get_rank() if ranks() > 1 else 0


def from_all_ranks(mine: T) -> list[T]:
    """Return what each rank has; every rank must call this."""
    if ranks() == 1:
        return [mine]
    gathered = [mine] * ranks()
    distributed.all_gather_object(gathered, mine)  # into the list
    return gathered


@contextmanager
def raising_on_all_ranks(what: str) -> Iterator[None]:
    """Raise RuntimeError on every rank if the block raises an error on any of them, which gets its own error."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = from_all_ranks(None if error is None else str(error))
    failed = [f"rank {r}: {text}" for r, text in enumerate(texts) if text]
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on {some(failed)}")


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, as torch.distributed.fsdp.fully_shard makes them.

    Importing its class takes a second, which most users do not need to spend.

    Inside a forward, and so when it is compiled, fully_shard has gathered the parameters.
    """
    return hasattr(tensor, "to_local") and not running().compiled


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has: all of it, if it is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. If it is sharded, every process must call this."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full
