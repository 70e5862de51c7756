"""The figures at the top of the page."""

from dataclasses import dataclass

from qtoolkit.debug.page.facts import ReportFacts
from qtoolkit.debug.page.tables import Table, Verified
from qtoolkit.debug.page.words import count, percent, size
from qtoolkit.export.verification.deployed import DeployedVerification


@dataclass(frozen=True)
class Figure:
    """A figure with its title, and a line below it."""

    title: str
    value: str
    below: str = ""


def figures_of(facts: ReportFacts, accuracy: Table | None, verification: Verified | None) -> list[Figure]:
    """Return the figures of a report."""
    report = facts.report
    kept = f"{len(report.left_float)} in float, {len(report.tensors)} quantized tensors"
    found = [Figure("Ops quantized", f"{len(report.quantized)}", kept)]
    found += _of_costs(facts)
    if facts.comparison is not None and facts.comparison.layers:
        worst = facts.comparison.layers[0]
        output = facts.comparison.output
        below = f"cosine {output.cosine:.6f}; worst layer {worst.name}, {worst.own.sqnr:.1f} dB alone"
        found.append(Figure("Output SQNR", f"{output.sqnr:.1f} dB", below))
    if accuracy is not None:
        found += _of_accuracy(accuracy)
    elif facts.sensitivity is not None:
        scores = facts.sensitivity
        below = f"{scores.float_score:.4g} in float"
        found.append(Figure("Score", f"{scores.quantized_score:.4g}", below))
    clipped = {name: values.clipped for name, values in facts.values.items() if values.clipped is not None}
    if clipped:
        most = max(clipped, key=lambda name: clipped[name])
        found.append(Figure("Most clipped", percent(clipped[most]), facts.titles.get(most, most)))
    return found + _of_codes(verification)


def _of_accuracy(accuracy: Table) -> list[Figure]:
    """Return the score in the last row of the first numeric column, and the scores of the rows before it."""
    column = next((place for place, _ in enumerate(accuracy.columns) if accuracy.numeric(place)), None)
    rows = [row for row in accuracy.rows if column is not None and row[column].sort is not None]
    if column is None or not rows:
        return []
    *others, last = rows
    title = "Score" if accuracy.columns[column] == "score" else accuracy.columns[column]
    name = [row[0].text if column else "" for row in rows]
    before = [f"{row[column].text} {label}".strip() for label, row in zip(name, others, strict=False)]
    return [Figure(title, last[column].text, "; ".join(filter(None, (name[-1], *before))))]


def _of_costs(facts: ReportFacts) -> list[Figure]:
    stored, whole = sum(cost.bytes for cost in facts.costs), sum(cost.float_bytes for cost in facts.costs)
    if not whole:
        return []
    found = [Figure("Weights", size(stored), f"{size(whole)} in float32: {whole / stored:.2f} times smaller")]
    operations = sum(cost.bit_operations or 0 for cost in facts.costs)
    macs = sum(cost.macs or 0 for cost in facts.costs)
    if macs:
        below = f"{count(macs)} multiplications; {macs * 1024 / operations:.2f} times fewer than in float32"
        found.append(Figure("Bit operations", count(operations), below))
    return found


def _of_codes(verification: Verified | None) -> list[Figure]:
    if verification is None:
        return []
    if isinstance(verification, DeployedVerification):
        found = {codes.runtime: codes.codes for codes in verification.runtimes.values()}
    else:
        found = {"onnxruntime, layer by layer": verification.layer_codes}
    return [
        Figure("Differing values", f"{codes.differing:,}", f"of {codes.compared:,} in {name}")
        for name, codes in found.items()
    ]
