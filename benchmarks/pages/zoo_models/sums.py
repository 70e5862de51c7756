"""The zoo's results summed for docs/zoo.md: by family, by how models are prepared, and by what remains in float."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.pages.zoo_models.table import Outcome, as_code, one_line
from benchmarks.report import markdown_lines

AS_IT_IS, LEAVES, PARTS, CAPTURED, REPLACED = "as it is", "leaf modules", "parts", "captured", "replaced"
BEFORE_QUANTIZED = ("build", "float", "trace", "prepare", "process", "time")
EVAL_MODE = "prepared in eval mode"  # how the note of such a recipe begins
OLDER = "exporter='torchscript'"  # how the note of a recipe with torch's older exporter begins
TORCHSCRIPT = '`export_onnx(..., exporter="torchscript")`'
MOST = 150  # characters of a cell


def route(outcome: Outcome) -> str:
    """Return how the model was quantized."""
    if outcome.get("replaced"):
        return REPLACED
    if outcome.get("captured"):
        return CAPTURED
    return PARTS if outcome.get("parts") else LEAVES if outcome.get("skip") else AS_IT_IS


def unchanged(outcomes: Iterable[Outcome]) -> int:
    """Return how many models trace as they are."""
    return sum(route(o) == AS_IT_IS for o in _quantized(outcomes))


def _quantized(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o["failed"] not in BEFORE_QUANTIZED]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table with the sums over all models."""
    done, whole = [o for o in outcomes if not o["failed"]], len(outcomes)
    exported = _exported(done)
    exact = sum(differing(o) == 0 for o in exported)
    ties, outputs = _ties(exported)
    rows = [
        ["models that pass every step", f"{len(done)} of {whole}"],
        ["models that trace unchanged", f"{unchanged(outcomes)} of {whole}"],
        ["ONNX files in which every weight and every quantizer equals PyTorch's", f"{exact} of {len(exported)}"],
        ["weights and quantized values compared in these files", f"{sum(map(compared, exported)):,}"],
        ["outputs of layers that differ by one step (rounding ties)", f"{ties:,} of {outputs:,}"],
        ["layers with weights that are quantized", f"{sum(o['quantized'] for o in done):,}"],
        ["layers with weights that remain in float", f"{sum(map(_in_float, done)):,}"],
        [
            "models that equal the float model bit for bit with quantizers disabled",
            f"{sum(o['off_difference'] == 0 for o in done)} of {len(done)}",
        ],
    ]
    return "\n".join(markdown_lines(["result", "count"], rows))


def differing(outcome: Outcome) -> int:
    """Return how many weights and quantized values differ in onnxruntime."""
    return int(outcome["weight_codes"][0] + outcome["quantizer_codes"][0])


def compared(outcome: Outcome) -> int:
    """Return how many weights and quantized values were compared with onnxruntime's."""
    return int(outcome["weight_codes"][1] + outcome["quantizer_codes"][1])


def _in_float(outcome: Outcome) -> int:
    return sum(map(len, outcome["left_float"].values()))


def _exported(done: Iterable[Outcome]) -> list[Outcome]:
    return [o for o in done if o["output_difference"] is not None]


def _ties(exported: Iterable[Outcome]) -> tuple[int, int]:
    counts = [o["layer_codes"] for o in exported]
    return sum(count[0] for count in counts), sum(count[1] for count in counts)


def families(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each library and family."""
    head = ["library", "family", "models", "unchanged", "with a remedy", "fail", "layers quantized", "layers in float"]
    rows = [[*names, *_sums(group)] for names, group in by_family(outcomes).items()]
    return "\n".join(markdown_lines([*head, "values that differ", "rounding ties"], rows))


def by_family(outcomes: Iterable[Outcome]) -> Mapping[tuple[str, str], Sequence[Outcome]]:
    """Return the results of each library and family; the family is "" where it has the name of the library."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        library = library_of(outcome)
        groups[library, "" if outcome["family"] == library else outcome["family"]].append(outcome)
    return groups


def library_of(outcome: Outcome) -> str:
    """Return the package that a model comes from."""
    return str(outcome["name"].partition("/")[0])


def _sums(group: Sequence[Outcome]) -> list[str]:
    done = [o for o in group if not o["failed"]]
    exported = _exported(done)
    as_they_are = unchanged(done)
    counts = [len(group), as_they_are, len(done) - as_they_are, len(group) - len(done)]
    layers = [sum(o["quantized"] for o in done), sum(map(_in_float, done)), sum(map(differing, exported))]
    return [*(f"{count:,}" for count in (*counts, *layers)), "{:,} of {:,}".format(*_ties(exported))]


def ways(outcomes: Sequence[Outcome]) -> str:
    """Return a table with how models are prepared."""
    quantized = _quantized(outcomes)
    counts = Counter(map(route, quantized))
    named = sum(route(o) == LEAVES and bool(o.get("untraceable")) for o in quantized)
    in_eval = sum(route(o) == AS_IT_IS and _note(o).startswith(EVAL_MODE) for o in quantized)
    leaves = f"with leaf modules in `untraced`; the error of `prepare` names them for {named} of these models"
    words = {
        AS_IT_IS: f"unchanged; {in_eval} of these models in eval mode" if in_eval else "unchanged",
        LEAVES: leaves,
        PARTS: "part by part: between the parts is Python, or an op that torch cannot export",
        CAPTURED: '`capture="export"`, as the error of `prepare` advises',
        REPLACED: "`qt.quant_modules.replace`, as the error of `prepare` advises",
    }
    rows = [[words[way], str(counts[way])] for way in words if counts[way]]
    return "\n".join(markdown_lines(["prepared", "models"], rows))


def remedies(outcomes: Sequence[Outcome]) -> str:
    """Return a table with the models that need more than a call of `prepare` and `export_onnx`, what they need, and why."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for outcome in outcomes:
        for remedy, reason in _remedies(outcome):
            groups[library_of(outcome), remedy, reason].append(outcome["name"].partition("/")[2])
    rows = [[*key, ", ".join(names)] for key, names in sorted(groups.items())]
    return "\n".join(markdown_lines(["library", "remedy", "reason", "models"], rows))


def _remedies(outcome: Outcome) -> Iterator[tuple[str, str]]:
    way, note = route(outcome), _note(outcome)
    if way == PARTS:
        yield f"parts: {_names(outcome['parts'])}", note
    elif way == LEAVES:
        yield f"`untraced`: {_names(outcome['skip'])}", _cause(outcome)
    elif way != AS_IT_IS:
        yield '`capture="export"`' if way == CAPTURED else "`qt.quant_modules.replace`", _cause(outcome)
    if outcome.get("older_exporter"):
        yield TORCHSCRIPT, "the default exporter raises an error that names the other one"
    if note and way != PARTS:
        remedy, _, reason = note.partition(": ")
        yield TORCHSCRIPT if remedy == OLDER else remedy, reason


# What an error of `prepare` has in it, and the reason in short.
CAUSES: Mapping[str, str] = {
    "torch.autograd.Function": "calls a torch.autograd.Function",
    "torch.autocast is entered": "enters torch.autocast",
    "is_autocast_enabled": "asks whether autocast is on, for the device of a tensor",
    "control flow": "Python uses the value of a tensor",
    "draws random numbers": "draws random numbers",
    "torch.tensor(": "makes a tensor of a size",
    "new() received": "makes a tensor by x.new(sizes)",
    "its graph fails": "Python decides by something that a trace does not see",
}


def _cause(outcome: Outcome) -> str:
    """Return why the model cannot be traced, by the first error."""
    error = outcome.get("untraceable", "").partition(" Remedies: ")[0]
    return next((cause for words, cause in CAUSES.items() if words in error), "")


def _note(outcome: Outcome) -> str:
    return str(outcome.get("note", ""))


def _names(names: Sequence[str]) -> str:
    """Return names of submodules. Names that differ only in numbers are one pattern, and a long list is cut."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if any(name.startswith(f"{other}.") for other in names):
            continue
        groups[re.sub(r"\d+", "*", name)].append(name)
    short = [pattern if len(group) > 1 else group[0] for pattern, group in groups.items()]
    fitting = [name for place, name in enumerate(short) if sum(map(len, short[: place + 1])) < MOST]
    more = f" and {len(short) - len(fitting)} more" if len(fitting) < len(short) else ""
    return ", ".join(f"`{name}`" for name in fitting) + more


def in_float(outcomes: Iterable[Outcome]) -> str:
    """Return a table with the layers with weights that remain in float, by reason."""
    left = Counter(
        label for o in outcomes if not o["failed"] for label, names in o["left_float"].items() for _ in names
    )
    rows = [[label, str(count)] for label, count in left.most_common()]
    return "\n".join(markdown_lines(["reason in the report", "layers"], rows)) if rows else "None."


def failures(outcomes: Iterable[Outcome]) -> str:
    """Return a table of the models that fail at a step, with the error."""
    rows = [[o["name"], o["failed"], as_code(one_line(o["error"]))] for o in outcomes if o["failed"]]
    return "\n".join(markdown_lines(["model", "step", "error"], rows)) if rows else "None."
