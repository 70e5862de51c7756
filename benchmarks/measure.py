"""Timing side by side: pieces of work on the same tensor, in turn, as multiples of the first; and what autograd keeps."""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

ROOF = "roof"
SHORTEST_SAMPLE = 200e-6  # seconds; shorter work is called several times, so that it is timed as it runs in a loop
LONGEST_SAMPLE_CALLS = 1000
FEWEST_REPEATS = 3
PAUSE = 0.03  # seconds, between models with threads of their own: those of the model before go to sleep

# Parameters of glibc's mallopt, by their numbers in malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4


@dataclass(frozen=True)
class Timed:
    """Work that says itself how long it took, such as a step of a model in another process."""

    seconds: Callable[[], float | None]

    def __call__(self) -> float | None:
        return self.seconds()


Work = Mapping[str, Callable[[], object]]  # a Timed gives the time of a call, everything else is timed here


@dataclass(frozen=True)
class Case:
    """Pieces of work on the same tensor.

    The one named ROOF is what the others are divided by. Where the goal is a time, there is none: `limit_us` is that time.

    Attributes:
        group: The table that the case is in.
        name: What the pieces work on.
        work: The pieces.
        goal: The multiple of the roof that our pieces should reach.
        limit_us: The roof where it is a time, in microseconds.
        warm_up: What to call before the pieces, each of which is then timed once: work of seconds. None: warm up with each
            piece, and repeat it.
        pause: Seconds before each sample: PAUSE where pieces have threads of their own.
        bytes: Of what each piece works on, or makes; taken after the pieces were timed.
        kept: The bytes that each piece keeps for backward.
        absent: Why there is no work, or no time, for a piece.
        end: What to call when the case is no longer needed.
    """

    group: str
    name: str
    work: Work
    goal: str = ""
    limit_us: float | None = None
    warm_up: Callable[[], object] | None = None
    pause: float = 0.0
    bytes: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    kept: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    absent: Callable[[], Mapping[str, str]] = dict
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Times:
    """The seconds that one call of a piece took in each round, over a number of calls."""

    calls: int
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)


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
    """How often to repeat a case, for how many seconds at most but how often at least, and how to wait for the device."""

    repeats: int
    seconds: float
    sync: Callable[[], None] = lambda: None
    fewest: int = FEWEST_REPEATS


def measure(case: Case, threads: int, pace: Pace) -> Row:
    """Time all pieces of a case, in turn, and take medians.

    A slow case ends after `pace.seconds`, but is repeated `pace.fewest` times at least.
    """
    times = times_of(case, threads, pace)
    medians = {name: 1e6 * of.median for name, of in times.items()}
    roof = medians.pop(ROOF) if case.limit_us is None else case.limit_us
    ratios = {name: median / roof for name, median in medians.items()}
    widest = max(spread(of.seconds) for of in times.values())
    repeats = max(len(of.seconds) for of in times.values())
    return Row(case.group, case.name, threads, repeats, widest, roof, ratios, case.goal)


def times_of(case: Case, threads: int, pace: Pace) -> dict[str, Times]:
    """Time all pieces of a case, in turn."""
    torch.set_num_threads(threads)
    torch.compiler.reset()  # compiled code holds the sizes and the number of threads that it was compiled for
    calls, samples, once = {}, {}, case.warm_up is not None
    if case.warm_up is not None:
        case.warm_up()
    for name, work in case.work.items():
        timed_here = not isinstance(work, Timed)
        calls[name] = _calls_in_a_sample(work, pace.sync) if timed_here and not once else 1
        samples[name] = partial(sample, work, calls[name], pace.sync) if timed_here else work
    seconds = take_turns(samples, replace(pace, fewest=1, repeats=1) if once else pace, case.pause)
    return {name: Times(calls[name], of) for name, of in seconds.items()}


def take_turns(
    samples: Mapping[str, Callable[[], float | None]], pace: Pace, pause: float = 0
) -> dict[str, list[float]]:
    """Return the seconds that each piece took in each round, in which they take turns; None is no figure.

    Meanwhile Python does not look for garbage: a search would be the time of the piece that it happens to meet.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samples}
    gc.collect()
    gc.disable()
    try:
        end, rounds = time.perf_counter() + pace.seconds, 0
        while rounds < pace.fewest or (rounds < pace.repeats and time.perf_counter() < end):
            for name, sampled in samples.items():
                time.sleep(pause)
                if (taken := sampled()) is not None:
                    seconds[name].append(taken)
            rounds += 1
    finally:
        gc.enable()
    return seconds


def sample(
    work: Callable[[], object],
    calls: int = 1,
    sync: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that one call takes, over several."""
    sync()
    start = clock()
    for _ in range(calls):
        work()
    sync()
    return (clock() - start) / calls


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range as a share of the median; 0 of one value."""
    if len(values) == 1:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / statistics.median(values)


def _calls_in_a_sample(work: Callable[[], object], sync: Callable[[], None]) -> int:
    """Warm up, and return how many calls last for the shortest sample."""
    work()
    return min(LONGEST_SAMPLE_CALLS, math.ceil(SHORTEST_SAMPLE / sample(work, 1, sync)))


def keep_memory() -> None:
    """Let the allocator keep what is freed: a fresh mapping's page faults cost several times what any kernel does."""
    set_allocator({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 1 << 30})


def set_allocator(parameters: Mapping[int, int]) -> None:
    """Set parameters of the C library's allocator for this process, where it has them (man 3 mallopt)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)


def bytes_kept(forward: Callable[..., Tensor], *inputs: Any) -> int:
    """Return the bytes that autograd keeps for the backward of a forward; tensors that share memory count once."""
    return sum(kept_storages(lambda: forward(*inputs)).values())


def kept_bytes(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the bytes that autograd keeps for backward, for each element of x; tensors that share memory count once."""
    forward(x)  # compiles where there is something to compile
    return bytes_kept(forward, x) / x.numel()


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
