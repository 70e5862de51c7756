"""The same models in other tools: how many pass each step, and the errors of the others."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.pages.zoo_models.sums import AS_IT_IS, OLDER, route
from benchmarks.pages.zoo_models.table import as_code, one_line
from benchmarks.report import markdown_lines

OURS, PLAIN = "qtoolkit", "qtoolkit, without remedies"
OF_ALL, OF_PASSING = "all", "passing"  # the models of which the sample is drawn
# Each tool, and its distribution.
TOOLS: Mapping[str, str] = {
    "torchao pt2e": "torchao",
    "NNCF": "nncf",
    "Model Optimizer": "nvidia-modelopt",
    "Brevitas": "brevitas",
}
STEPS = ("build", "prepare", "train", "export", "run", "compare")
# The step of another tool that a step of the zoo counts as; the zoo compares as it exports.
STEPS_OF_ZOO: Mapping[str, str] = {
    "build": "build",
    "train": "train",
    "convert": "export",
    "export": "export",
    "time": "time",
    "process": "process",
}
NEAR = 0.01  # outputs that differ by less, relative to the largest
EQUAL = 1e-5

Row = Mapping[str, Any]


def ours(zoo: Mapping[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the zoo's results for these models, with the remedies of the zoo and without."""
    of = {o["name"]: o for o in zoo["models"]}
    return [row for name in names for row in (_with_remedies(of[name]), _without(of[name]))]


def _with_remedies(outcome: Row) -> dict[str, Any]:
    failed = STEPS_OF_ZOO.get(outcome["failed"], "prepare") if outcome["failed"] else ""
    difference = None if failed else outcome["output_difference"]
    return {
        "model": outcome["name"],
        "tool": OURS,
        "failed": failed,
        "error": outcome["error"],
        "difference": difference,
    }


def _without(outcome: Row) -> dict[str, Any]:
    """Return a model's row as if no remedy was known: it fails where the error, or the recipe, names one."""
    row = {**_with_remedies(outcome), "tool": PLAIN}
    if row["failed"]:
        return row
    if route(outcome) != AS_IT_IS:
        error = outcome.get("untraceable") or "cannot be traced as a whole"
        return {**row, "failed": "prepare", "error": error, "difference": None}
    older = outcome.get("older_exporter") or (outcome["note"] if outcome["note"].startswith(OLDER) else "")
    return {**row, "failed": "export", "error": older, "difference": None} if older else row


def sums(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: how far the models of the sample came with each tool."""
    head = ["tool", "prepared", "trained", "exported", "runs in onnxruntime", "within 1 %", "equal", "out of time"]
    lines = []
    for tool in (OURS, PLAIN, *TOOLS):
        rows = [row for row in results["models"] if row["tool"] == tool]
        if rows:
            name = f"{tool} {results[TOOLS[tool]]}" if tool in TOOLS else tool
            counts = [*(_past(rows, step) for step in STEPS[1:5]), _within(rows, NEAR), _within(rows, EQUAL)]
            lines.append([name, *map(str, [*counts, sum(row["failed"] == "time" for row in rows)])])
    return markdown_lines(head, lines)


def _past(rows: Iterable[Row], step: str) -> int:
    """Return how many models got further than a step."""
    return sum(
        not row["failed"] or (row["failed"] in STEPS and STEPS.index(row["failed"]) > STEPS.index(step)) for row in rows
    )


def _within(rows: Iterable[Row], bound: float) -> int:
    return sum(row["difference"] is not None and row["difference"] <= bound for row in rows)


def failures(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: the errors of each tool and step. Errors that differ only in numbers are one row."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in results["models"]:
        if row["failed"] not in ("", "time") and row["tool"] != PLAIN:
            error = one_line(row["error"], 110)
            groups[row["tool"], row["failed"], re.sub(r"\d+", "", error)].append(error)
    places = {step: place for place, step in enumerate(STEPS)}
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], places.get(item[0][1], len(places)), -len(item[1])))
    rows = [[tool, step, as_code(errors[0]), str(len(errors))] for (tool, step, _), errors in ordered]
    return markdown_lines(["tool", "step", "error", "models"], rows)


def models_in(results: Mapping[str, Any]) -> Sequence[str]:
    """Return the models of the sample."""
    return list(Counter(row["model"] for row in results["models"]))
