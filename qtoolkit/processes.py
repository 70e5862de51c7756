"""The processes of torch.distributed: how many there are, and errors that all of them raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qtoolkit.errors import some

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
    gathered: list[Any] = [None] * ranks()
    distributed.all_gather_object(gathered, mine)
    return gathered


@contextmanager
def raising_on_all_ranks(what: str) -> Iterator[None]:
    """Raise RuntimeError on every rank, with what went wrong on the others, if the block raises an error on any of them.

    The rank on which it was raised gets its own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = [
        f"rank {r}: {text}" for r, text in enumerate(from_all_ranks(None if error is None else str(error))) if text
    ]
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on {some(failed)}")


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel and torch.compile, whose names are those of its state dict."""
    inner = vars(without_ddp(model)).get("_modules", {}).get("_orig_mod")
    return without_ddp(model) if inner is None else unwrapped(inner)
