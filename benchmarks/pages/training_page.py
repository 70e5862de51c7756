"""Writes the results of training into docs/performance.md, and the plot beside it.

python -m benchmarks.pages.training_page    takes train_step.json, short_steps.json and memory.json of benchmarks/results

Needs matplotlib. Run it after train_step or memory. short_steps.json is what train_step writes by
`--size 32 --batch 2 --threads 1 --networks resnet18 mobilenet_v2 vit --out benchmarks/results/short_steps.json`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.stored import write_part
from benchmarks.report import markdown_lines
from benchmarks.training.demands import COLUMNS, demand_lines, ratios_of
from benchmarks.training.networks import NETWORKS
from benchmarks.training.options import rows_of
from benchmarks.training.plot import draw
from benchmarks.training.tables import call_tables, failures, most_threads, overview, profile_tables

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- Written by benchmarks/pages/training_page.py: change nothing up to the next mark. -->"
END = "<!-- End of what benchmarks/pages/training_page.py writes. -->"

Results = Mapping[str, Any]


def section(results: Mapping[str, Results], plot: str) -> str:
    """Return the text between the marks for the results, by name of their file."""
    parts = [list(PARTS[name](results[name])) for name in PARTS if name in results]
    demands = [line for name in PARTS if name in results for line in _demands(name, results[name])]
    head = [f"![Time of a step and bytes kept for backward, as multiples of the float model's]({plot})", ""]
    if demands:
        head += ["### Goals", "", *markdown_lines(COLUMNS, demands), ""]
    return "\n".join([*head, *(line for part in parts for line in part)])


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
    return _times(
        "Time of a step of short ops: small images, of which the interpreter and reading the weights take the most",
        results,
    )


def _times(title: str, results: Results) -> Iterator[str]:
    yield from (f"### {title}", "", _where(results), "")
    for threads in sorted({row["threads"] for row in rows_of(results)}):
        rows = [row for row in rows_of(results) if row["threads"] == threads]
        _, names, lines = overview(rows, "ratio", "")
        yield from (f"Multiples of the float model's step, threads: {threads}.", "", *markdown_lines(names, lines), "")
    yield from _without_figure(results)
    for title, names, lines in (*profile_tables(results), *call_tables(results)):
        yield from (f"### {title}", "", *markdown_lines(names, lines), "")


def _of_memory(results: Results) -> Iterator[str]:
    yield from ("### Memory of a step", "", _where(results), "")
    meanings = {"kept": "Bytes kept for backward", "peak": "Peak above what is in use between steps"}
    for figure, meaning in meanings.items():
        _, names, lines = overview(rows_of(results), figure, "")
        yield from (f"{meaning}, as multiples of the float model's.", "", *markdown_lines(names, lines), "")
    yield from _without_figure(results)


def _where(results: Results) -> str:
    where = results["device"] if results["device"] != "CPU" else f"{results['cpu']}, {results['cores']} cores"
    commands = dict.fromkeys(f"`{of['command']}`" for of in results["networks"].values())
    measured = any(row["kind"] == "peer" for row in rows_of(results))
    versions = ", ".join(f"{name} {version}" for name, version in results["peers"].items() if name != "torch")
    others = f" Other tools: {versions}." if measured else ""
    return f"{', '.join(commands)}: batch {results['batch']}, {where}, torch {results['torch']}.{others}"


def _without_figure(results: Results) -> Iterator[str]:
    if reasons := failures(rows_of(results)):
        yield from ("Without a figure:", "", *(f"- {reason}" for reason in reasons), "")


PARTS = {"train_step": _of_steps, "short_steps": _of_short_steps, "memory": _of_memory}


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
    draw(results, {name: network.title for name, network in NETWORKS.items()}, plot)


if __name__ == "__main__":
    main()
