"""The table of the zoo, as markdown and for the console."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    how = "replaced" if outcome.get("replaced") else 'capture="export"' if outcome.get("captured") else ""
    words += [f"{how}, as it cannot be traced: {one_line(outcome['untraceable'], SHORT)}"] if how else []
    words += ["exporter='torchscript', as the error of 'dynamo' advises"] if outcome.get("older_exporter") else []
    words += [f"skip {', '.join(outcome['skip'])}".replace("*", r"\*")] if outcome.get("skip") else []
    words += [outcome["note"]] if outcome.get("note") else []
    words += [f"**{outcome['failed']}: {one_line(outcome['error'])}**"] if outcome["failed"] else []
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


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the sums over all models, as a list: how each was quantized, what the files hold, what remains in float."""
    done = [o for o in outcomes if not o["failed"]]
    failed = [o["name"] for o in outcomes if o["failed"]]
    roads = Counter(road(o) for o in outcomes if o["failed"] not in BEFORE_QUANTIZED)
    whole = len(outcomes)
    zero = sum(o["off_difference"] == 0 for o in done)
    exported = [o for o in done if o["output_difference"] is not None]
    exact = [o for o in exported if o["weight_codes"][0] + o["quantizer_codes"][0] == 0]
    codes = sum(o["weight_codes"][1] + o["quantizer_codes"][1] for o in exported)
    layers = sum(o["layer_codes"][0] for o in exported), sum(o["layer_codes"][1] for o in exported)
    older = sum(bool(o.get("older_exporter")) or "exporter='torchscript'" in o["note"] for o in exported)
    quantized = sum(o["quantized"] for o in done)
    left = Counter(label for o in done for label, names in o["left_float"].items() for _ in names)
    lines = [
        f"**{whole} models: {roads[AS_IT_IS]} ({_share(roads[AS_IT_IS], whole)}) trace as they are.** {roads[LEAVES]} trace "
        f"with the leaf modules that the error names, {roads[PARTS]} (most of them detectors and optical flow) in parts, "
        f'{roads[CAPTURED]} with `capture="export"`, as the error advises, and in {roads[REPLACED]} '
        f"`qt.quant_modules.replace` quantizes all layers: {_share(sum(roads.values()), whole)} by one of "
        "these roads.",
        f"**{len(done)} went through all steps**, training{_steps(done)} and onnxruntime included; {len(failed)} did not"
        f"{': ' if failed else ''}{', '.join(failed)}.",
        f"**Codes that differ: in {len(exact)} of {len(exported)} files none** of the weights' and the quantizers' "
        f"({codes:,} codes compared). {layers[0]:,} of {layers[1]:,} values of layers differ by one step, as rounding ties.",
        f"{older} of the {len(exported)} files were written by torch's older exporter, as its newer one raised an error.",
        f"**{quantized:,} layers with weights are quantized, {left.total()} remain in float**, each with its reason in the "
        f"report: {'; '.join(f'{count} {label}' for label, count in left.most_common())}.",
        f"With quantizers disabled and batch norms kept, {zero} of {len(done)} equal the float model bit for bit.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _steps(done: Sequence[Outcome]) -> str:
    """Return how many models trained how many steps: " (steps of SGD: 3 in 310, 1 in 218)"."""
    counts = sorted(Counter(o["steps"] for o in done).items(), reverse=True)
    words = ", ".join(f"{steps} in {count}" for steps, count in counts)
    return f" (steps of SGD: {words})" if words else ""


def failures(outcomes: Iterable[Outcome]) -> str:
    """Return a table of the models that did not go through all steps, with the error."""
    failed = [o for o in outcomes if o["failed"]]
    rows = [f"| {o['name']} | {o['failed']} | {one_line(o['error'])} |" for o in failed]
    return "\n".join(["| model | step | error |", "|---|---|---|", *rows]) if failed else "Nothing."


AS_IT_IS, LEAVES, PARTS, CAPTURED, REPLACED = "as it is", "leaf modules", "parts", "captured", "replaced"
BEFORE_QUANTIZED = ("build", "float", "trace", "prepare", "process", "time")


def road(outcome: Outcome) -> str:
    """Return how the model was quantized."""
    if outcome.get("replaced"):
        return REPLACED
    if outcome.get("captured"):
        return CAPTURED
    return PARTS if outcome["parts"] else LEAVES if outcome["skip"] else AS_IT_IS


def _share(count: int, whole: int) -> str:
    return f"{100 * count / max(whole, 1):.1f} %"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return a table for each family."""
    lines = []
    for family in dict.fromkeys(o["family"] for o in outcomes):
        lines += [f"## {family.capitalize() if family != 'timm' else family}", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(map(breakable, row(o))) + " |" for o in outcomes if o["family"] == family]
        lines += [""]
    return "\n".join(lines)


def breakable(cell: str) -> str:
    """Return a cell whose long names a browser may break between their parts, so that the table fits the page."""
    return re.sub(r"\S{15,}", lambda word: re.sub(r"[._/=]|[a-z](?=[A-Z\d])", r"\g<0><wbr>", word[0]), cell)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    table = Table(*COLUMNS)
    for outcome in outcomes:
        table.add_row(*row(outcome))
    Console(width=240).print(table)
