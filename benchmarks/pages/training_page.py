"""Writes the results of training into docs/performance.md, with a plot, and details into docs/design/performance.md.

python -m benchmarks.pages.training_page    takes train_step.json, short_steps.json and memory.json of benchmarks/results

The details are the goals, the times on fewer threads, profiles, and counts of ops. It needs matplotlib. Run it after train_step
or memory. short_steps.json is what train_step writes by
`--size 32 --batch 2 --threads 1 --networks resnet18 mobilenet_v2 vit --out benchmarks/results/short_steps.json`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.stored import write_part
from benchmarks.report import markdown_lines
from benchmarks.training.demands import COLUMNS, demand_lines, ratios_of
from benchmarks.training.networks import NETWORKS
from benchmarks.training.options import rows_of
from benchmarks.training.plot import draw
from benchmarks.training.tables import Table, call_tables, failures, most_threads, overview, profile_tables

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- Written by benchmarks/pages/training_page.py: change nothing up to the next mark. -->"
END = "<!-- End of what benchmarks/pages/training_page.py writes. -->"
OPTION, CODE = re.compile(r'\w+="\w+"|torch\.compile\(fullgraph=True\)'), r"`\g<0>`"

Results = Mapping[str, Any]


def section(results: Mapping[str, Results], plot: str) -> str:
    """Return the text between the marks of the guide, for the results by name of their file."""
    head = [f"![Time of a step and bytes kept for backward, as multiples of the float model's]({plot})", ""]
    return "\n".join([*head, *(line for name in PARTS if name in results for line in PARTS[name](results[name]))])


def details(results: Mapping[str, Results]) -> str:
    """Return the text between the marks of the page on design."""
    lines = [line for name in DETAILS if name in results for line in DETAILS[name](results[name])]
    if demands := [line for name in PARTS if name in results for line in _demands(name, results[name])]:
        lines = ["### Goals of a training step", "", *markdown_lines(COLUMNS, demands), "", *lines]
    return "\n".join(lines)


def _demands(name: str, results: Results) -> list[list[str]]:
    if name == "train_step":
        return demand_lines("step", ratios_of(most_threads(rows_of(results)), "ratio"))
    if name == "memory":
        return [
            line for figure in ("kept", "peak") for line in demand_lines(figure, ratios_of(rows_of(results), figure))
        ]
    return []


def _of_steps(results: Results) -> Iterator[str]:
    return _times("Time of a step", results)


def _of_short_steps(results: Results) -> Iterator[str]:
    return _times("Time of a step with small images", results)


def _times(title: str, results: Results) -> Iterator[str]:
    yield from (f"### {title}", "", _where(results), "")
    yield from _times_on(most_threads(rows_of(results)))
    yield from _without_figure(results)


def _times_on(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    _, names, lines = overview(rows, "ratio", "")
    where = f"Multiples of the float model's step, threads: {rows[0]['threads']}."
    yield from (where, "", *markdown_lines(names, [*_shown(lines)]), "")


def _shown(lines: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the lines with the options of ours in place of its name, as code."""
    for described, *cells in lines:
        _, _, meaning = described.partition(": ")
        yield [f"qtoolkit: {OPTION.sub(CODE, meaning)}" if meaning else described, *cells]


def _details_of_steps(results: Results) -> Iterator[str]:
    rows = rows_of(results)
    yield from ("### Commands of the time of a step", "", "```", *_commands(results), "```", "")
    fewer = sorted({row["threads"] for row in rows} - {max(row["threads"] for row in rows)})
    for threads in fewer:
        yield from (f"### Time of a step, threads: {threads}", "")
        yield from _times_on([row for row in rows if row["threads"] == threads])
    yield from _tables(profile_tables(results))


def _details_of_short_steps(results: Results) -> Iterator[str]:
    yield from ("### Steps with small images", "", "```", *_commands(results), "```", "")
    yield from _tables((title, names, [*_shown(lines)]) for title, names, lines in call_tables(results))


def _details_of_memory(results: Results) -> Iterator[str]:
    yield from ("### Commands of the memory of a step", "", "```", *_commands(results), "```", "")


def _tables(tables: Iterator[Table]) -> Iterator[str]:
    for title, names, lines in tables:
        yield from (f"### {title}", "", *markdown_lines(names, lines), "")


def _of_memory(results: Results) -> Iterator[str]:
    yield from ("### Memory of a step", "", _where(results), "")
    meanings = {"kept": "Bytes kept for backward", "peak": "Peak above the memory that is in use between steps"}
    for figure, meaning in meanings.items():
        _, names, lines = overview(rows_of(results), figure, "")
        yield from (f"{meaning}, as multiples of the float model's.", "", *markdown_lines(names, [*_shown(lines)]), "")
    yield from _without_figure(results)


def _commands(results: Results) -> list[str]:
    return list(dict.fromkeys(of["command"] for of in results["networks"].values()))


def _where(results: Results) -> str:
    where = results["device"] if results["device"] != "CPU" else f"{results['cpu']}, {results['cores']} cores"
    measured = any(row["kind"] == "peer" for row in rows_of(results))
    versions = ", ".join(f"{name} {version}" for name, version in results["peers"].items() if name != "torch")
    others = f" Other tools: {versions}." if measured else ""
    return f"Batch {results['batch']}, {where}, torch {results['torch']}.{others}"


def _without_figure(results: Results) -> Iterator[str]:
    if reasons := failures(rows_of(results)):
        yield from ("Without a figure:", "", *(f"- {reason}" for reason in reasons), "")


PARTS = {"train_step": _of_steps, "short_steps": _of_short_steps, "memory": _of_memory}
DETAILS = {"train_step": _details_of_steps, "short_steps": _details_of_short_steps, "memory": _details_of_memory}


def main() -> None:
    """Write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args()
    files = {name: args.results / f"{name}.json" for name in PARTS}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    plot = args.page.with_name("training.svg")
    write_part(args.page, BEGIN, END, ["", section(results, plot.name)])
    if (page := args.page.parent / "design" / args.page.name).exists():
        write_part(page, BEGIN, END, ["", details(results)])
    draw(results, {name: network.title for name, network in NETWORKS.items()}, plot)


if __name__ == "__main__":
    main()
