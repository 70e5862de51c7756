"""The tables of the page: columns, cells and sort keys."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qtoolkit.config import QConfig
from qtoolkit.debug.page.details import range_of
from qtoolkit.debug.page.facts import ReportFacts
from qtoolkit.debug.page.words import count, percent
from qtoolkit.debug.similarity import Similarity
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.export.verification.deployed import DeployedVerification, RuntimeCodes
from qtoolkit.export.verification.verify import Verification

Accuracy = Mapping[str, object] | Sequence[Mapping[str, object]]  # the scores of a model, or of several
Verified = Verification | DeployedVerification

POOR_SQNR, FULL_SQNR = 20.0, 60.0  # dB: below the first a cell is marked, at the second its bar is full


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str  # what it shows
    sort: float | None = None  # the number that sorts it; None sorts by the text
    bar: float | None = None  # the length of its bar, from 0 to 1; None for none
    poor: bool = False  # whether it is marked
    key: str = ""  # the key of what the page says of it, to which it links


@dataclass(frozen=True)
class Table:
    """A table: the titles of its columns, and its rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def numeric(self, column: int) -> bool:
        """Return whether a column holds numbers."""
        return any(row[column].sort is not None for row in self.rows)


def layer_cell(name: str) -> Cell:
    """Return a cell with the name of an op or a layer."""
    return Cell(name, key=f"op {name}")


def number(value: float | None, form: str | Callable[[float], str] = ".4g") -> Cell:
    """Return a cell with a number, formatted by a format specification or a function."""
    if value is None:
        return Cell("-", -math.inf)
    return Cell(format(value, form) if isinstance(form, str) else form(value), float(value))


def accuracy_table(accuracy: Accuracy) -> Table:
    """Return the user's table: a dict gives a row per entry, a list of dicts a column per key."""
    if isinstance(accuracy, Mapping):
        return Table(("model", "score"), tuple((Cell(str(name)), _any(value)) for name, value in accuracy.items()))
    columns = tuple(dict.fromkeys(str(key) for row in accuracy for key in row))
    by_name = [{str(key): value for key, value in row.items()} for row in accuracy]
    return Table(columns, tuple(tuple(_any(row.get(column, "")) for column in columns) for row in by_name))


def _any(value: object) -> Cell:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else Cell(str(value))


def error_table(facts: ReportFacts) -> Table | None:
    """Return the errors of the layers."""
    if facts.comparison is None:
        return None
    rows = [
        (layer_cell(x.name), Cell(x.kind), *_similarity(x.own), *_similarity(x.accumulated), _sqnr(x.weight))
        for x in facts.comparison.layers
    ]
    columns = ("layer", "op", "own SQNR", "own cosine", "accumulated SQNR", "accumulated cosine", "weight SQNR")
    return Table(columns, tuple(rows))


def _similarity(found: Similarity) -> tuple[Cell, Cell]:
    return _sqnr(found), Cell(f"{found.cosine:.6f}", found.cosine)


def _sqnr(found: Similarity | None) -> Cell:
    if found is None:
        return Cell("-", -math.inf)
    value = found.sqnr
    return Cell(f"{value:.1f} dB", value, min(max(value / FULL_SQNR, 0.0), 1.0), value < POOR_SQNR)


def sensitivity_table(facts: ReportFacts) -> Table | None:
    """Return the score drop of each layer."""
    found = facts.sensitivity
    if found is None:
        return None
    most = max((row.drop for row in found.rows), default=0.0)
    rows = [
        (
            layer_cell(row.name) if found.by == "layer" else Cell(row.name),
            Cell(row.kind),
            number(row.score),
            Cell(f"{row.drop:.3g}", row.drop, max(row.drop, 0.0) / most if most > 0 else 0.0),
        )
        for row in found.rows
    ]
    return Table((found.by, "op", "score", "drop"), tuple(rows))


def float_table(facts: ReportFacts) -> Table:
    """Return the ops that stay in float, and the reasons."""
    rows = [
        (layer_cell(x.name), Cell(x.kind), Cell(str(x.verdict.cause)), Cell(x.reason.removeprefix("float: ")))
        for x in facts.report.left_float
    ]
    return Table(("layer", "op", "cause", "why"), tuple(rows))


def range_table(facts: ReportFacts) -> Table:
    """Return the ranges of all activations."""
    rows = []
    for line in facts.report.tensors:
        quantizer, values = facts.quantizers.get(line.quantizer), facts.values.get(line.quantizer)
        clipped = None if values is None else values.clipped
        cell = Cell("-", -1.0) if clipped is None else Cell(percent(clipped), clipped, poor=clipped > 0.01)
        limits = Cell("-") if quantizer is None else Cell(range_of(quantizer))
        rows.append((Cell(line.title, key=f"quantizer {line.quantizer}"), Cell(line.spec), limits, cell))
    return Table(("tensor", "how", "range", "clipped"), tuple(rows))


def cost_table(facts: ReportFacts) -> Table:
    """Return the size and the operations of the layers with a weight."""
    costs = facts.costs
    most = max((cost.bytes for cost in costs), default=0.0) or 1.0
    rows = [
        (
            layer_cell(cost.name),
            Cell(cost.kind),
            Cell(_bits(cost.config)),
            number(cost.weights, ","),
            number(cost.float_bytes, ",.0f"),
            Cell(f"{cost.bytes:,.0f}", cost.bytes, cost.bytes / most),
            number(cost.macs, ","),
            number(cost.bit_operations, count),
        )
        for cost in costs
    ]
    columns = ("layer", "op", "weight x input", "weights", "float bytes", "bytes", "multiplications", "bit operations")
    return Table(columns, tuple(rows))


def _bits(config: QConfig) -> str:
    specs = (config.weight, config.activation)
    return " x ".join("float" if spec is None else f"{spec.bits} bits" for spec in specs)


# ---- verification


def verification_tables(found: Verified, titles: Mapping[str, str]) -> list[tuple[str, Table]]:
    """Return the tables of a verification, each with its title."""
    if isinstance(found, DeployedVerification):
        return [table for codes in found.runtimes.values() for table in _of_runtime(codes, titles)]
    totals = {"weights": found.weight_codes, "quantizers": found.quantizer_codes, "layers": found.layer_codes}
    title = f"Layer by layer in onnxruntime; end to end, outputs differ by at most {found.output_difference:.3g}"
    return [
        (title, _codes(totals, {}, "values")),
        ("Layer by layer, at each quantizer", _codes(found.by_quantizer, titles)),
    ]


def _of_runtime(codes: RuntimeCodes, titles: Mapping[str, str]) -> list[tuple[str, Table]]:
    """Return the quantized values of a runtime, the places where differences begin, and its kernels."""
    title = f"{codes.runtime}, end to end; outputs differ by at most {codes.output_difference:.3g}"
    found = [(title, _codes(codes.by_quantizer, titles))]
    if codes.layer_by_layer is not None and codes.codes.differing:
        begun = {name: count for name, count in codes.layer_by_layer.items() if count.differing}
        title = f"Where differences begin in {codes.runtime}: layer by layer, from its quantized values"
        found.append((title, _codes(begun, titles)))
    rows = [(layer_cell(x.name), Cell(x.kernel), Cell("integers" if x.integer else "float")) for x in codes.layers]
    return [*found, (f"Kernels of {codes.runtime}", Table(("layer", "kernel", "computes in"), tuple(rows)))]


def _codes(counts: Mapping[str, CodeCount], titles: Mapping[str, str], of: str = "quantizer") -> Table:
    rows = [
        (
            Cell(titles.get(name, name), key=f"quantizer {name}"),
            number(codes.compared, ","),
            Cell(f"{codes.differing:,}", codes.differing, poor=not codes.are_ties()),
            number(100 * codes.share, ".3g"),
            number(codes.steps, "d"),
        )
        for name, codes in counts.items()
    ]
    return Table((of, "compared", "differing", "%", "largest step"), tuple(rows))
