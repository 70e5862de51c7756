"""The table of the zoo, as markdown and for the console."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

LONGEST_ERROR = 240
Outcome = Mapping[str, Any]

COLUMNS = (
    "model",
    "layers quantized",
    "layers left in float",
    "other ops quantized",
    "other ops in float",
    "off, norms kept",
    "off, norms folded",
    "layer codes differing",
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
    words += [f"skip {', '.join(outcome['skip'])}".replace("*", r"\*")] if outcome.get("skip") else []
    words += [outcome["note"]] if outcome.get("note") else []
    words += [f"**{outcome['failed']}: {_one_line(outcome['error'])}**"] if outcome["failed"] else []
    return "; ".join(words)


def _one_line(error: str) -> str:
    """Return the beginning of an error as one line, without terminal colours or column separators."""
    plain = re.sub(r"\x1b\[\d*m", "", error).replace("|", "/")
    return " ".join(plain.split())[:LONGEST_ERROR]


def _codes(outcome: Outcome) -> str:
    exported = outcome.get("output_difference") is not None
    if not exported:
        return ""
    exact = outcome["weight_codes"][0] + outcome["quantizer_codes"][0]
    layers = "{:,} of {:,}".format(*outcome["layer_codes"])
    return layers if exact == 0 else f"{layers}; weights and quantizers {exact:,}"


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return a paragraph on all models."""
    done = [o for o in outcomes if not o["failed"]]
    failed = [o["name"] for o in outcomes if o["failed"]]
    zero = sum(o["off_difference"] == 0 for o in done)
    exported = [o for o in done if o["output_difference"] is not None]
    equal = sum(o["weight_codes"][0] + o["quantizer_codes"][0] == 0 for o in exported)
    codes = sum(o["weight_codes"][1] + o["quantizer_codes"][1] for o in exported)
    layers = sum(o["layer_codes"][0] for o in exported), sum(o["layer_codes"][1] for o in exported)
    return (
        f"{len(done)} models went through all steps, {len(failed)} did not{': ' if failed else ''}{', '.join(failed)}. "
        f"With quantizers disabled and batch norms kept, {zero} of {len(done)} equal the float model bit for bit. "
        f"{len(exported)} were exported: in {equal} of them all codes of weights and quantizers are equal in onnxruntime "
        f"({codes:,} codes compared). {layers[0]:,} of {layers[1]:,} layer codes differ by one step, as rounding ties. "
        f"{sum(o['quantized'] for o in done):,} layers with weights are quantized, "
        f"{sum(len(names) for o in done for names in o['left_float'].values()):,} remain in float."
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the summary and a table for each family."""
    lines = [summary(outcomes), ""]
    for family in dict.fromkeys(o["family"] for o in outcomes):
        lines += [f"## {family.capitalize() if family != 'timm' else family}", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(row(o)) + " |" for o in outcomes if o["family"] == family]
        lines += [""]
    return "\n".join(lines)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    table = Table(*COLUMNS)
    for outcome in outcomes:
        table.add_row(*row(outcome))
    Console(width=240).print(table)
