"""The rows of `pytest benchmarks`: groups of pieces of work, and their times on the clock of pytest-benchmark."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from benchmarks.measure import Case, Times


@dataclass(frozen=True)
class Settings:
    """What the options of `pytest benchmarks` ask for."""

    device: str
    full: bool
    threads: int


@dataclass(frozen=True)
class Group:
    """Rows that are timed side by side.

    Attributes:
        build: Returns a case that has the pieces which are asked for, or more.
        rows: The piece of each row. The first row is what the others are compared with.
        peers: The same for the rows of other tools, which `--peers` adds.
        on_cpu_alone: Why the group is for a CPU, as the second part of a sentence; empty where it runs on a GPU too.
        slow: The rows that `make test` leaves out, since their setup takes long.
    """

    build: Callable[[Settings, Sequence[str]], Case]
    rows: Mapping[str, str]
    peers: Mapping[str, str] = field(default_factory=dict)
    on_cpu_alone: str = ""
    slow: Collection[str] = ()

    @property
    def pieces(self) -> dict[str, str]:
        """The piece of each row, of ours and of other tools."""
        return {**self.rows, **self.peers}

    @property
    def first(self) -> str:
        """The row that the others are compared with."""
        return next(iter(self.rows))


class Replay:
    """Work for pytest-benchmark that takes, by the clock of `now`, the times that were measured; once they are over, it works.

    pytest-benchmark times one row after the other, on a machine that is another one a second later. Rows that take turns see
    the same machine. So with `--benchmark-disable`, where nothing was measured, the work is done, as it is for a profile.
    """

    _now = 0.0

    @classmethod
    def now(cls) -> float:
        """Return the seconds on the clock, which only a Replay moves."""
        return cls._now

    def __init__(self, work: Callable[[], object], times: Times | None) -> None:
        self.work, self.times = work, times
        measured = times.seconds if times is not None else ()
        self._calls: Iterator[float] = chain.from_iterable(repeat(s, times.calls) for s in measured if times)

    def __call__(self) -> None:
        seconds = next(self._calls, None)
        if seconds is None:
            self.work()
        else:
            Replay._now += seconds
