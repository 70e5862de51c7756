"""Time of a training step with quantizers, as a multiple of the float model's: ours in each mode, and other tools.

python -m benchmarks.pages.train_step                       prints the tables and writes benchmarks/results/train_step.json
python -m benchmarks.pages.train_step --compile --peers     with compiled models, and the tools that are installed
python -m benchmarks.pages.train_step --partial .25         with models that update a quarter of the channels
python -m benchmarks.pages.train_step --profile             the slowest ops of our step and of the float model's, too
python -m benchmarks.pages.train_step --calls               how many ops a step calls, too
python -m benchmarks.pages.train_step --quick --networks resnet18 --only ours

A step is zero_grad, forward, loss, backward and SGD's step. Every subject lives in a process of its own, in which the
allocator keeps its memory; they take turns, one step at a time, and the table has the ratio of medians and of least times.
With --together they take turns in groups, each with a float model of its own, which its ratios are to.
Learned scales, int8 weights and activations; networks have random weights. --device cuda measures on a GPU.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.measure import PAUSE, Pace, Timed, spread, take_turns
from benchmarks.report import show
from benchmarks.training import options
from benchmarks.training.subjects import CODES, FLOAT, INTEGER, kind_of
from benchmarks.training.tables import call_tables, profile_tables, step_tables
from benchmarks.training.trainer import Settings
from benchmarks.training.worker import SubjectError, Worker

PROFILED = (FLOAT, CODES, INTEGER)

Workers = dict[str, Worker | str]  # by name of the subject: its process, or why there is none


@dataclass(frozen=True)
class Row:
    """A subject on a number of threads.

    Attributes:
        network: The network.
        subject: What is trained.
        kind: "float", "ours" or "peer".
        threads: The number of threads.
        milliseconds: The median time of a step; None where there is no figure, for the reason in `failure`.
        ratio: The median as a multiple of the float model's.
        least: The least time as a multiple of the float model's least.
        spread: The interquartile range as a share of the median.
        rounds: How many steps were timed.
        difference: See `training.trainer.Trainer`.
        failure: Why there is no figure.
    """

    network: str
    subject: str
    kind: str
    threads: int
    milliseconds: float | None = None
    ratio: float | None = None
    least: float | None = None
    spread: float | None = None
    rounds: int = 0
    difference: float | None = None
    failure: str = ""


def step_of(workers: Workers, name: str) -> Timed:
    """Return the step of a worker, which its process times; None where it does not train."""
    return Timed(lambda: ask(workers, name, "time"))


def ask(workers: Workers, name: str, request: str, *args: Any) -> Any:
    """Return a worker's answer (see `training.trainer.REQUESTS`); one that fails is replaced by the reason, and gives None."""
    worker = workers[name]
    if not isinstance(worker, Worker):
        return None
    try:
        return worker.ask(request, *args)
    except SubjectError as error:
        worker.end()
        workers[name] = str(error)
        return None


def rows_of(network: str, workers: Workers, threads: int, times: Mapping[str, list[float]]) -> list[Row]:
    """Return the row of each subject."""
    rows = []
    for name, worker in workers.items():
        head = (network, name, kind_of(name), threads)
        if not isinstance(worker, Worker):
            rows.append(Row(*head, failure=worker))
            continue
        own, floats = times[name], times[FLOAT]
        median = statistics.median(own)
        ratios = (median / statistics.median(floats), min(own) / min(floats))
        rows.append(Row(*head, 1e3 * median, *ratios, spread(own), len(own), worker.difference))
    return rows


def set_threads(workers: Workers, threads: int) -> None:
    """Set the threads of all processes."""
    for name in workers:
        ask(workers, name, "set_threads", threads)


def end_all(workers: Workers) -> None:
    """End all processes."""
    for worker in workers.values():
        if isinstance(worker, Worker):
            worker.end()


def answers(workers: Workers, request: str, subjects: Iterable[str]) -> dict[str, Any]:
    """Return what each of these subjects that trains answers to a request; see `training.trainer.Trainer`."""
    found = {name: ask(workers, name, request) for name in subjects if name in workers}
    return {name: answer for name, answer in found.items() if answer is not None}


def groups_of(chosen: list[Settings], together: int | None) -> list[list[Settings]]:
    """Return the subjects that take turns: all of them, or groups of a size, each with the float model first."""
    first, *others = chosen
    size = max((together or len(chosen)) - 1, 1)
    return [[first, *others[start : start + size]] for start in range(0, max(len(others), 1), size)]


def measured(group: list[Settings], args: argparse.Namespace) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """Return the rows of a group, and what else is asked for, by subject: the profiles of those in PROFILED, and the calls."""
    rows = []
    workers = {s.subject: options.started(s) for s in tqdm(group, desc=group[0].network, leave=False)}
    for threads in args.threads:
        set_threads(workers, threads)
        steps = {name: step_of(workers, name) for name in workers}
        times = take_turns(steps, Pace(args.rounds, args.seconds), PAUSE)
        rows += rows_of(group[0].network, workers, threads, times)
    more = {
        "profile": answers(workers, "profile", PROFILED if args.profile else ()),
        "calls": answers(workers, "calls", workers if args.calls else ()),
    }
    end_all(workers)
    return rows, more


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    parser = options.parser_of(__doc__, "train_step.json")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600, help="of the rounds of a group; 3 rounds at least")
    parser.add_argument(
        "--together", type=int, help="how many take turns, one of them the float model, where memory is short"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--calls", action="store_true")
    args = parser.parse_args()
    for network in args.networks:
        found = [measured(group, args) for group in groups_of(options.settings_of(args, network), args.together)]
        rows = [row for i, (rows, _) in enumerate(found) for row in rows if i == 0 or row.subject != FLOAT]
        more = {
            what: {name: ops for _, of_group in reversed(found) for name, ops in of_group[what].items()}
            for what in ("profile", "calls")
        }
        by_threads = [asdict(row) for threads in args.threads for row in rows if row.threads == threads]
        results = options.add_to_file(args, network, rows=by_threads, **more)
    for title, names, cells in (*step_tables(results), *profile_tables(results), *call_tables(results)):
        show(Console(width=180), title, names, cells)


if __name__ == "__main__":
    main()
