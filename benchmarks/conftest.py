"""Options of `pytest benchmarks`, its rows, and its tables.

The rows of a group take turns when the first of them runs (benchmarks/measure.py); pytest-benchmark gets the times of each row
(benchmarks/rows.py), so that all its options work. Without --peers nothing is imported that an installation may lack.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from benchmarks import peers
from benchmarks.measure import Case, Pace, Times, keep_memory, spread, times_of
from benchmarks.report import processor_features, versions
from benchmarks.rows import Group, Replay, Settings
from qtoolkit.extras import install_command

HERE = Path(__file__).parent
MOST_ROUNDS = 201
SECONDS, FEWEST = "0.5", 15  # for each row, where --benchmark-max-time and --benchmark-min-rounds are not given
INSTALL_PEERS = "pip install -r benchmarks/peers/requirements.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks of qtoolkit")
    group.addoption("--device", default="cpu", metavar="cpu|cuda", help="where ops and steps run (cpu)")
    group.addoption("--size", default="small", metavar="small|full", help="full: the sizes of docs/performance.md")
    group.addoption("--threads", default=None, metavar="NUM", help="by default torch's: one for each core")
    group.addoption("--peers", action="store_true", help="other tools beside ours; those not installed are skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and set how pytest-benchmark shows rows where its own options do not."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(f"benchmarks need pytest-benchmark, which is not installed; run: {_install()}.")
    _check(config)
    option, given = config.option, config.invocation_params.args
    ours = {
        "columns": ["median", "iqr", "rounds", "iterations"],
        "sort": "name",  # names begin with the number of the row
        "max_time": SECONDS,
        "min_rounds": FEWEST,
    }
    for name, value in ours.items():
        if not any(argument.startswith(f"--benchmark-{name.replace('_', '-')}") for argument in given):
            setattr(option, f"benchmark_{name}", value)


def _install() -> str:
    return install_command("benchmarks")


def _check(config: pytest.Config) -> None:
    device, size, threads = (config.getoption(name) for name in ("device", "size", "threads"))
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"--device must be cpu or cuda, and is {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device is cuda, but torch finds no GPU here; leave it out to measure on the CPU.")
    if size not in ("small", "full"):
        raise pytest.UsageError(f"--size must be small or full, and is {size!r}.")
    if threads is not None and (not threads.isdigit() or int(threads) < 1):
        raise pytest.UsageError(f"--threads must be a whole number from 1 on, and is {threads!r}.")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect the benchmarks alone: pytest would import every script for its examples, and what scripts need."""
    return None if collection_path == HERE or collection_path.match(f"{HERE}/test_*.py") else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each row of the groups of a module."""
    rows = []
    for name, group in metafunc.module.GROUPS.items():
        for row in (*group.rows, *(group.peers if metafunc.config.getoption("peers") else ())):
            marks = [pytest.mark.benchmark(group=name, timer=Replay.now), *[pytest.mark.slow] * (row in group.slow)]
            rows.append(pytest.param(name, row, id=f"{name}: {row}", marks=marks))
    metafunc.parametrize(("group", "row"), rows)


def pytest_collection_finish() -> None:
    """Leave what is imported out of every search for garbage, which takes a quarter of the time of an export."""
    gc.freeze()
    gc.set_threshold(10_000)


class Bench:
    """The group whose rows run now: its case, and the times of its pieces once they are measured."""

    def __init__(self, config: pytest.Config, selected: Mapping[str, Sequence[str]]) -> None:
        self.config, self.selected = config, selected
        threads = config.getoption("threads")
        self.settings = Settings(
            config.getoption("device"),
            config.getoption("size") == "full",
            torch.get_num_threads() if threads is None else int(threads),
        )
        self.facts = {
            "threads": self.settings.threads,
            "device": torch.cuda.get_device_name() if self.settings.device == "cuda" else "CPU",
            "size": "full" if self.settings.full else "small",
            "features": processor_features(),
            "versions": versions(),
        }
        self.name = ""
        self.times: dict[str, Times] = {}

    def begin(self, name: str, group: Group, timed: bool) -> Case:
        """Return the case of a group, whose selected rows have been timed beside its first row."""
        if self.name != name:
            self.end()
            torch.manual_seed(0)
            torch.set_num_threads(self.settings.threads)
            chosen = list(dict.fromkeys(group.pieces[row] for row in (group.first, *self.selected[name])))
            self.case, self.name = group.build(self.settings, chosen), name
            work = {piece: self.case.work[piece] for piece in chosen if piece in self.case.work}
            self.times = (
                times_of(replace(self.case, work=work), self.settings.threads, self._pace(len(work))) if timed else {}
            )
        return self.case

    def _pace(self, pieces: int) -> Pace:
        sync = torch.cuda.synchronize if self.settings.device == "cuda" else lambda: None
        seconds = float(self.config.getoption("benchmark_max_time"))
        return Pace(MOST_ROUNDS, pieces * seconds, sync, self.config.getoption("benchmark_min_rounds"))

    def end(self) -> None:
        """Free what a group has."""
        if self.name:
            self.case.end()
            del self.case
            self.name = ""


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if "side_by_side" in getattr(item, "fixturenames", ()):
            selected.setdefault(item.callspec.params["group"], []).append(item.callspec.params["row"])
    threads = torch.get_num_threads()
    keep_memory()
    bench = Bench(request.config, selected)
    yield bench
    bench.end()
    torch.set_num_threads(threads)


@pytest.fixture
def side_by_side(bench: Bench, benchmark: Any, request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Report the times of a row of a group, and in `extra_info` what they are compared with and where they were taken."""

    def report(name: str, row: str) -> None:
        group: Group = request.module.GROUPS[name]
        if group.on_cpu_alone and bench.settings.device != "cpu":
            pytest.skip(f"it runs on the CPU alone: {group.on_cpu_alone}")
        try:
            case = bench.begin(name, group, benchmark.enabled)
        except ModuleNotFoundError as error:
            _leave_out(f"ModuleNotFoundError: {error}", in_peers=False)
        first, piece = group.pieces[group.first], group.pieces[row]
        for needed in (first, piece):
            if (reason := case.absent().get(needed)) is not None:
                _leave_out(reason, in_peers=row in group.peers)
        times = bench.times.get(piece)
        if times is not None:
            benchmark.extra_info["ratio"] = times.median / bench.times[first].median
            benchmark.extra_info["spread"] = spread(times.seconds)
        of_row = {"row": list(group.pieces).index(row) + 1, "baseline": group.first}
        benchmark.extra_info |= facts_of(case, piece, first) | of_row | bench.facts
        if row in group.peers:
            benchmark.extra_info["versions"] = bench.facts["versions"] | peers.versions()
        rounds, calls = (len(times.seconds), times.calls) if times is not None else (1, 1)
        benchmark.pedantic(Replay(case.work[piece], times), rounds=rounds, iterations=calls)

    return report


def _leave_out(reason: str, in_peers: bool) -> NoReturn:
    """Skip what is not installed, and other tools that do not run; ours must run."""
    if reason.startswith("ModuleNotFoundError"):
        pytest.skip(f"{reason}; run: {INSTALL_PEERS if in_peers else _install()}")
    if in_peers:
        pytest.skip(reason)
    pytest.fail(reason, pytrace=False)


def facts_of(case: Case, piece: str, first: str) -> dict[str, Any]:
    """Return the bytes of a piece, and those that it keeps for backward, also as a multiple of the first's."""
    found: dict[str, Any] = {"bytes": case.bytes[piece]()} if piece in case.bytes else {}
    if piece in case.kept:
        found["kept_bytes"] = case.kept[piece]()
        if first in case.kept:
            found["kept_ratio"] = found["kept_bytes"] / case.kept[first]()
    return found


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_group_stats(benchmarks: list[dict[str, Any]]) -> Iterator[Any]:
    """Number the rows, and say by how much each differs from the first row of its group in the same run."""
    groups = yield
    for _, rows in groups:
        firsts = {row["source"]: row["median"] for row in rows if row["extra_info"].get("row") == 1}
        for row in rows:
            ratio = f"  x {row['median'] / firsts[row['source']]:.2f}" if row["source"] in firsts else ""
            row["name"] = f"{row['extra_info']['row']} {row['params']['row']}{ratio}"
    return groups
