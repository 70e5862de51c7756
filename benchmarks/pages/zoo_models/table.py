"""The results of each model, for the console."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

LONGEST_ERROR = 240
SHORT = 200
Outcome = Mapping[str, Any]

COLUMNS = (
    "model",
    "layers quantized",
    "layers left in float",
    "other ops quantized",
    "other ops in float",
    "off, norms kept",
    "off, norms folded",
    "layer values differing",
    "output difference",
    "trace, s",
    "rest of prepare, s",
    "notes",
)


def row(outcome: Outcome) -> list[str]:
    """Return the cells of one model."""
    seconds = outcome.get("seconds", {})
    rest = max(seconds.get("prepare", 0.0) - seconds.get("trace", 0.0), 0.0)
    return [
        outcome["name"].partition("/")[2] or outcome["name"],
        str(outcome.get("quantized", "")),
        floats(outcome.get("left_float", {})) or "none",
        str(outcome.get("ops_quantized", "")),
        floats(outcome.get("ops_float", {})) or "none",
        _number(outcome.get("off_difference")),
        _number(outcome.get("folded_difference")),
        _codes(outcome),
        _number(outcome.get("output_difference")),
        f"{seconds.get('trace', 0.0):.2f}",
        f"{rest:.2f}",
        notes(outcome),
    ]


def floats(names: Mapping[str, Sequence[str]]) -> str:
    """Return the number of ops in float of each label."""
    counts = Counter({label: len(of_label) for label, of_label in names.items()})
    return ", ".join(f"{count} {label}" for label, count in counts.most_common())


def notes(outcome: Outcome) -> str:
    """Return the parts, the skipped submodules, the remark of the recipe, and the error if a step failed."""
    words = [f"parts {', '.join(outcome['parts'])}"] if outcome.get("parts") else []
    how = "replaced" if outcome.get("replaced") else 'capture="export"' if outcome.get("captured") else ""
    words += [f"{how}, as it cannot be traced: {one_line(outcome['untraceable'], SHORT)}"] if how else []
    words += ["exporter='torchscript', as the error of 'dynamo' advises"] if outcome.get("older_exporter") else []
    words += [f"skip {', '.join(outcome['skip'])}"] if outcome.get("skip") else []
    words += [outcome["note"]] if outcome.get("note") else []
    words += [f"{outcome['failed']}: {one_line(outcome['error'])}"] if outcome["failed"] else []
    return "; ".join(words)


def one_line(error: str, longest: int = LONGEST_ERROR) -> str:
    """Return the beginning of an error as one line, without terminal colours or column separators."""
    plain = re.sub(r"\x1b\[\d*m", "", error).replace("|", "/")
    return " ".join(plain.split())[:longest]


def _codes(outcome: Outcome) -> str:
    exported = outcome.get("output_difference") is not None
    if not exported:
        return ""
    exact = outcome["weight_codes"][0] + outcome["quantizer_codes"][0]
    layers = "{:,} of {:,}".format(*outcome["layer_codes"])
    return layers if exact == 0 else f"{layers}; weights and quantizers {exact:,}"


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def as_code(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return f"`{text.replace('`', chr(39))}`"


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    table = Table(*COLUMNS)
    for outcome in outcomes:
        table.add_row(*row(outcome))
    Console(width=240).print(table)
