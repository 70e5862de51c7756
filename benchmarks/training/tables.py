"""The tables of the results, as the console and the page show them: title, names of columns, cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.training.demands import COLUMNS, demand_lines, ratios_of
from benchmarks.training.networks import NETWORKS
from benchmarks.training.options import rows_of
from benchmarks.training.subjects import FLOAT, MEANING

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
Rows = Sequence[Mapping[str, Any]]

MIB = 2**20
NOISY = 0.3  # an interquartile range above this share of the median is marked
LEAST_SHARE = 0.01  # of the float model's step: ops below it are added up
OTHER = "all others"


def step_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Return the tables of train_step.json."""
    for network, rows in _by_network(rows_of(results)):
        threads = sorted({row["threads"] for row in rows})
        names = [f"{figure}, {n} threads" for n in threads for figure in ("x float", "least x least")]
        yield (
            f"{network}: time of a training step, batch {results['batch']}",
            ["what is trained", *names, "why there is no figure"],
            [_step_line(subject, of, threads) for subject, of in _by_subject(rows)],
        )
    yield from _demands("step", most_threads(rows_of(results)), "ratio")


def _step_line(subject: str, rows: Rows, threads: Sequence[int]) -> list[str]:
    by_threads = {row["threads"]: row for row in rows}
    cells = []
    for row in (by_threads.get(n) for n in threads):
        noisy = " ~" if row and (row["spread"] or 0) > NOISY else ""
        cells += (
            ["", ""] if row is None or row["ratio"] is None else [f"{row['ratio']:.2f}{noisy}", f"{row['least']:.2f}"]
        )
    return [_described(subject), *cells, rows[0]["failure"]]


def most_threads(rows: Rows) -> Rows:
    """Return the rows on the most threads that were measured."""
    most = max(row["threads"] for row in rows)
    return [row for row in rows if row["threads"] == most]


def memory_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Return the tables of memory.json."""
    for network, rows in _by_network(rows_of(results)):
        float_model = rows[0]
        units = [f"{figure}, x {float_model[f'{figure}_bytes'] / MIB:.1f} MiB" for figure in ("kept", "held", "peak")]
        yield (
            f"{network}: memory of a training step, batch {results['batch']}",
            ["what is trained", *units, "why there is no figure"],
            [
                [_described(row["subject"]), *(_ratio(row[name]) for name in ("kept", "held", "peak")), row["failure"]]
                for row in rows
            ],
        )
    for figure in ("kept", "peak"):
        yield from _demands(figure, rows_of(results), figure)


def overview(rows: Rows, figure: str, title: str) -> Table:
    """Return a figure of all subjects, a column for each network."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    ratios = ratios_of(rows, figure)
    subjects = dict.fromkeys(row["subject"] for row in rows)
    lines = [
        [_described(subject), *(_ratio(ratios.get(network, {}).get(subject)) for network in networks)]
        for subject in subjects
    ]
    return title, ["what is trained", *(NETWORKS[network].title for network in networks)], lines


def failures(rows: Rows) -> list[str]:
    """Return a line for each subject that has no figure, with the reason; one line for all that are not installed."""
    found = {(row["network"], row["subject"]): row["failure"] for row in rows if row["failure"]}
    absent = {subject: None for (_, subject), reason in found.items() if reason.startswith("ModuleNotFoundError")}
    lines = [
        f"{NETWORKS[network].title}, {subject}: {why}"
        for (network, subject), why in found.items()
        if subject not in absent
    ]
    return [*([f"not installed in this run: {', '.join(absent)}"] if absent else []), *lines]


def profile_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Return a table for each network that was profiled."""
    for network, found in results["networks"].items():
        if not (by_subject := found["profile"]):
            continue
        float_model, *others = by_subject.values()
        whole = sum(float_model.values())
        shares = [{op: seconds / whole for op, seconds in of.items()} for of in (float_model, *others)]
        ops = {op for of in shares for op, share in of.items() if share >= LEAST_SHARE}
        ordered = sorted(ops, key=lambda op: (-shares[-1].get(op, 0), op))
        lines = [[op, *(f"{100 * of.get(op, 0):.1f}" for of in shares)] for op in ordered]
        rest = [f"{100 * sum(share for op, share in of.items() if op not in ops):.1f}" for of in shares]
        total = [f"{100 * sum(of.values()):.1f}" for of in shares]
        yield (
            f"{NETWORKS[network].title}: processor time of the ops of a step, % of the float model's step",
            ["op", *by_subject],
            [*lines, [OTHER, *rest], ["sum", *total]],
        )


def call_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Return a table of the ops that a step calls, a column for each network, where they were counted."""
    counted = {network: calls for network, of in results["networks"].items() if (calls := of.get("calls"))}
    if not counted:
        return
    subjects = dict.fromkeys(subject for calls in counted.values() for subject in calls)
    yield (
        "Ops that a step calls, as multiples of the float model's",
        [
            "what is trained",
            *(f"{NETWORKS[name].title}: {of}" for name in counted for of in ("calls", "with nested calls")),
        ],
        [
            [_described(subject), *(cell for calls in counted.values() for cell in _calls(calls, subject))]
            for subject in subjects
        ],
    )


def _calls(calls: Mapping[str, Sequence[int]], subject: str) -> list[str]:
    if subject not in calls:
        return ["", ""]
    return [f"{own / floats:.2f}" for own, floats in zip(calls[subject], calls[FLOAT], strict=True)]


def _demands(figure: str, rows: Rows, field: str) -> Iterator[Table]:
    if lines := demand_lines(figure, ratios_of(rows, field)):  # not every network has demands
        yield f"demands on the {figure}", COLUMNS, lines


def _by_network(rows: Rows) -> Iterator[tuple[str, Rows]]:
    for network in dict.fromkeys(row["network"] for row in rows):
        yield NETWORKS[network].title, [row for row in rows if row["network"] == network]


def _by_subject(rows: Rows) -> Iterator[tuple[str, Rows]]:
    for subject in dict.fromkeys(row["subject"] for row in rows):
        yield subject, [row for row in rows if row["subject"] == subject]


def _described(subject: str) -> str:
    return f"{subject}: {MEANING[subject]}" if subject in MEANING else subject


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
