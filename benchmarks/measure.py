"""Timing side by side: pieces of work on the same tensor, in turn, as multiples of the first; and what autograd keeps."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOF = "roof"
SHORTEST_SAMPLE = 200e-6  # seconds; shorter work is called several times, so that it is timed as it runs in a loop
LONGEST_SAMPLE_CALLS = 1000
FEWEST_REPEATS = 3

# The allocator keeps its memory: a fresh mapping's page faults would otherwise cost several times what any kernel does.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "100000000000",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
}

Work = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Pieces of work on the same tensor.

    The one named ROOF is what the others are divided by. Where the goal is a time, there is none: `limit_us` is that time.
    """

    group: str
    name: str
    work: Work
    goal: str
    limit_us: float | None = None


@dataclass(frozen=True)
class Row:
    """Medians of one case: the roof in microseconds, the others as multiples of it.

    `spread` is the widest of the pieces' interquartile ranges, as a share of its median: what else ran on the machine.
    """

    group: str
    name: str
    threads: int
    repeats: int
    spread: float
    roof_us: float
    ratios: Mapping[str, float]
    goal: str


@dataclass(frozen=True)
class Pace:
    """How often to repeat a case, for how many seconds at most, and how to wait for the device."""

    repeats: int
    seconds: float
    sync: Callable[[], None]


def measure(case: Case, threads: int, pace: Pace) -> Row:
    """Time all pieces of a case, in turn, and take medians.

    A slow case ends after `pace.seconds`, but is repeated FEWEST_REPEATS times at least.
    """
    torch.set_num_threads(threads)
    torch.compiler.reset()  # compiled code holds the sizes and the number of threads that it was compiled for
    calls = {name: _calls_in_a_sample(work, pace.sync) for name, work in case.work.items()}
    times: dict[str, list[float]] = {name: [] for name in case.work}
    end, repeats = time.perf_counter() + pace.seconds, 0
    while repeats < FEWEST_REPEATS or (repeats < pace.repeats and time.perf_counter() < end):
        for name, work in case.work.items():
            times[name].append(_sample(work, calls[name], pace.sync))
        repeats += 1
    medians = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    roof = medians.pop(ROOF) if case.limit_us is None else case.limit_us
    ratios = {name: median / roof for name, median in medians.items()}
    return Row(case.group, case.name, threads, repeats, max(map(spread, times.values())), roof, ratios, case.goal)


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range as a share of the median."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / statistics.median(values)


def _calls_in_a_sample(work: Callable[[], object], sync: Callable[[], None]) -> int:
    """Warm up, and return how many calls last for the shortest sample."""
    work()
    seconds = _sample(work, 1, sync)
    return min(LONGEST_SAMPLE_CALLS, math.ceil(SHORTEST_SAMPLE / seconds))


def _sample(work: Callable[[], object], calls: int, sync: Callable[[], None]) -> float:
    """Return the seconds that one call takes, over several."""
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    sync()
    return (time.perf_counter() - start) / calls


def kept_bytes(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the bytes that autograd keeps for backward, for each element of x; tensors that share memory count once."""
    forward(x)  # compiles where there is something to compile
    return sum(kept_storages(lambda: forward(x)).values()) / x.numel()


def kept_storages(run: Callable[[], Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that autograd keeps for the backward of what `run` returns, by address."""
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = run()
    if not y.requires_grad:
        raise RuntimeError("kept_bytes: the forward has no gradient to keep anything for. Pass an x that requires one.")
    return kept
