"""Tooltips of the page for ops and quantizers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from qtoolkit.debug.page.facts import ReportFacts, ends_of
from qtoolkit.debug.page.picture import blocks_of, key_of
from qtoolkit.debug.page.words import interval, percent
from qtoolkit.debug.similarity import Similarity
from qtoolkit.graph.nodes import kind_of, name_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.report import LayerLine, TensorLine

Row = tuple[str, str]  # a label and a text


@dataclass(frozen=True)
class Detail:
    """The tooltip of an op or a quantizer."""

    title: str  # its name
    kind: str  # its status, or "quantizer"
    rows: tuple[Row, ...]  # what there is to say


def details_of(facts: ReportFacts) -> dict[str, Detail]:
    """Return the tooltip of each op and each quantizer, by its key."""
    found: dict[str, Detail] = {}
    for line in facts.report.layers:  # several for a module that is called several times
        detail, key = _of_layer(facts, line), f"op {line.name}"
        earlier = found.get(key, detail)
        found[key] = replace(earlier, rows=tuple(dict.fromkeys((*earlier.rows, *detail.rows))))
    tensors: dict[str, list[TensorLine]] = {}
    for tensor in facts.report.tensors:
        tensors.setdefault(tensor.quantizer, []).append(tensor)
    for name, quantizer in facts.quantizers.items():
        found[f"quantizer {name}"] = _of_quantizer(facts, name, quantizer, tensors.get(name, []))
    if isinstance(facts.model, fx.GraphModule):
        for block, number in Counter(blocks_of(facts.model).values()).items():
            found[f"block {block}"] = Detail(block, "block", (("ops", str(number)), ("click", "to unfold")))
        for node in facts.model.graph.nodes:
            found.setdefault(key_of(node), Detail(name_of(node), "plain", (("op", str(kind_of(node))),)))
    return found


def _of_layer(facts: ReportFacts, line: LayerLine) -> Detail:
    rows = [("op", line.kind), ("status", str(line.status)), ("why", line.reason or str(line.verdict.cause))]
    for name in line.quantizers:
        if name in facts.quantizers:
            what = "weight" if facts.quantizers[name].of_weight else "input"
            rows += [(what, spec_and_range(facts.quantizers[name]))]
    rows += [("in training", line.training)]
    error, drop = facts.errors.get(line.name), facts.drops.get(line.name)
    if error is not None:
        rows += [("own error", _similarity(error.own)), ("accumulated", _similarity(error.accumulated))]
    if drop is not None:
        rows += [("score drop", f"{drop.drop:.6g}")]
    return Detail(line.name, str(line.status), tuple((label, text) for label, text in rows if text))


def _similarity(found: Similarity) -> str:
    return f"{found.sqnr:.1f} dB, cosine {found.cosine:.6f}"


def _of_quantizer(facts: ReportFacts, name: str, quantizer: Quantizer, lines: Iterable[TensorLine]) -> Detail:
    spec, values = quantizer.spec, facts.values.get(name)
    rows = [("how", spec.describe()), ("bits", str(spec.bits)), ("range", range_of(quantizer)), *_of_grid(quantizer)]
    if values is not None:
        seen = interval(*map(float, values.histogram.observed()))
        rows += [("values", seen), ("clipped", percent(values.clipped))]
    for line in lines:
        rows += [("output of", line.title), ("used by", ", ".join(line.consumers))]
        rows += [("scale shared with", ", ".join(line.shares_scale_with))]
    rows += [("why", facts.reasons.get(name, ""))]
    off = "" if quantizer.quantizing else "off"
    return Detail(
        facts.titles.get(name, name), "quantizer", tuple(dict.fromkeys((a, b) for a, b in (*rows, ("now", off)) if b))
    )


def spec_and_range(quantizer: Quantizer) -> str:
    """Return the spec of a quantizer, with its range."""
    return f"{quantizer.spec.describe()} {range_of(quantizer)}"


def range_of(quantizer: Quantizer) -> str:
    """Return the lowest and the highest value of a quantizer's grid, over all channels."""
    ends = ends_of(quantizer)
    if ends is None:
        return "computed from each input" if quantizer.ready else "not calibrated"
    return interval(*ends)


def _of_grid(quantizer: Quantizer) -> list[Row]:
    """Return the range, the scale and the zero point of a static grid."""
    ends, rows = ends_of(quantizer), list[Row]()
    if ends is None:
        return rows
    rows += [("exact range", f"{ends[0]:.9g} to {ends[1]:.9g}")]
    scale, zero_point = quantizer.scale, quantizer.zero_point
    if scale is not None:
        several = f"{scale.numel()} from {float(scale.min()):.4g} to {float(scale.max()):.4g}"
        rows += [("scale", f"{float(scale):.6g}" if scale.numel() == 1 else several)]
    if zero_point is not None:
        low, high = float(zero_point.min()), float(zero_point.max())
        rows += [("zero point", f"{low:g}" if low == high else f"{low:g} to {high:g}")]
    return rows
