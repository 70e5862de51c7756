"""Progress bars: one form for every loop that can take longer than a second."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

from qtoolkit.model_inputs import tensors_of
from qtoolkit.processes import rank

T = TypeVar("T")
AFTER = 1.0  # seconds: a bar of less would only flicker


def progress_bar(
    name: str,
    unit: str,
    show: bool = True,
    over: Iterable[object] | None = None,
    total: int | None = None,
    after: float = AFTER,
) -> "tqdm[Any]":
    """Return a bar with the rate and the time that is left, which disappears at the end.

    It writes only to a terminal (stderr), only in the first process of a process group, and only `after` some seconds. `name`
    is its title, `unit` what is counted, in the plural, and `show` the `progress` argument of the public function. Without
    `over` the caller calls `update`; without `total` its length counts, where it has one.
    """
    return tqdm(
        over,
        desc=name,
        unit=f" {unit}",
        total=total,
        disable=None if show and rank() == 0 else True,  # None: where stderr is no terminal
        leave=False,
        delay=after,
        dynamic_ncols=True,
    )


def note(bar: "tqdm[Any]", text: str) -> None:
    """Show the number that matters at the end of a bar, from its next update on."""
    bar.set_postfix_str(text, refresh=False)


def step(bar: "tqdm[Any]", what: str) -> None:
    """Show what runs next, at once: for steps that take long and cannot be counted."""
    bar.set_postfix_str(what, refresh=False)
    bar.update()
    bar.refresh()


def batches_of(name: str, batches: Iterable[T], show: bool, total: int | None = None) -> Iterator[T]:
    """Yield batches under a bar that shows how many samples have run."""
    samples = 0
    with progress_bar(name, "batches", show, batches, total) as bar:
        for batch in bar:
            yield batch
            samples += next((tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()), 0)
            note(bar, f"{samples:,} samples")
