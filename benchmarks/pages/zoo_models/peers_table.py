"""The same models through other tools: sums side by side, and the error of each failure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.pages.zoo_models.table import one_line

OURS = "qtoolkit"
# Each tool, its distribution, and the step of it that the row names.
TOOLS: Mapping[str, str] = {
    "torchao pt2e": "torchao",
    "NNCF": "nncf",
    "Model Optimizer": "nvidia-modelopt",
    "Brevitas": "brevitas",
}
STEPS = ("build", "prepare", "train", "export", "run", "compare")
NEAR = 0.01  # outputs that differ by less, relative to the largest
EQUAL = 1e-5

Row = Mapping[str, Any]


def sums(results: Mapping[str, Any]) -> list[str]:
    """Return the rows of a table: how far the models of the sample came with each tool."""
    lines = [
        "| tool | prepared | trained | exported | runs in onnxruntime | outputs within 1 % | outputs equal | out of time |",
        "|---" * 8 + "|",
    ]
    for tool in (OURS, *TOOLS):
        rows = [row for row in results["models"] if row["tool"] == tool]
        if rows:
            name = tool if tool == OURS else f"{tool} {results[TOOLS[tool]]}"
            cells = [*(_past(rows, step) for step in STEPS[1:5]), _within(rows, NEAR), _within(rows, EQUAL)]
            cells.append(sum(row["failed"] == "time" for row in rows))
            lines.append("| " + " | ".join([name, *map(str, cells)]) + " |")
    return lines


def _past(rows: Iterable[Row], step: str) -> int:
    """Return how many models got further than a step."""
    return sum(
        not row["failed"] or (row["failed"] in STEPS and STEPS.index(row["failed"]) > STEPS.index(step)) for row in rows
    )


def _within(rows: Iterable[Row], bound: float) -> int:
    return sum(row["difference"] is not None and row["difference"] <= bound for row in rows)


def failures(results: Mapping[str, Any]) -> list[str]:
    """Return a table with the models that did not come through, and a tool's own words."""
    lines = ["", "What did not come through, with the error:", "", "| tool | model | step | error |", "|---" * 4 + "|"]
    failed = [row for row in results["models"] if row["failed"]]
    lines += [
        f"| {r['tool']} | {r['model']} | {r['failed']} | {one_line(r['error'], 160)} |"
        for r in sorted(failed, key=lambda r: r["tool"])
    ]
    return lines if failed else []


def models_in(results: Mapping[str, Any]) -> Sequence[str]:
    """Return the models of the sample."""
    return list(Counter(row["model"] for row in results["models"]))
