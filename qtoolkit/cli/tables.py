"""Text output of commands: tables on a terminal, with rich; otherwise one line per row, for grep and cut."""

import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtoolkit.export.description import FileDescription
from qtoolkit.lint.engine import Cost

Data = dict[str, Any]  # what a command finds, as JSON has it

SHOWN = 20  # rows of quantizers that differ, on a terminal


@dataclass(frozen=True)
class TextTable:
    """Rows of cells. A terminal shows the first `most` rows; otherwise each line starts with `file`.

    `spaced` rows, such as sentences, are separated by lines.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    file: str = ""
    spaced: bool = False
    most: int = sys.maxsize

    def lines(self) -> Iterable[str]:
        """Return a line for each row: its cells, separated by tabs."""
        for row in self.rows:
            yield "\t".join(" ".join(str(cell).split()) for cell in ((self.file, *row) if self.file else row))


def findings(data: Data) -> str:
    """Return the findings of lint as a table, their number, and an engine's estimated speed compared with float16."""
    file, found = data["file"], data["findings"]
    counted = f"{file}: {_count(len(found), 'finding')} for {data['backend']}; {_count(len(data['rules']), 'rule')}."
    return _rendered(_of_findings(found, file), counted, *_beside_float16(data))


def _of_findings(found: Sequence[Data], file: str) -> TextTable:
    rows = [(each["node"], each["rule"], f"{each['message']} {each['remedy']}", each["source"]) for each in found]
    return TextTable(("node", "rule", "problem and remedy", "source"), rows, file, spaced=True)


def _beside_float16(data: Data) -> list[str | TextTable]:
    if "beside_float16" not in data:
        return []
    file, estimate = data["file"], data["beside_float16"]
    others = [each for each in estimate["findings"] if each not in data["findings"]]
    sums = {name: str(Cost(**cost)) for name, cost in estimate["types"].items()}
    if estimate["unknown"]:
        sums["left out"] = f"{_count(estimate['unknown'], 'tensor')} of unknown size"
    return [
        f"{file}: reasons why it is no faster than float16: {_count(len(others), 'finding')} (not counted in the exit status).",
        _of_findings(others, file),
        f"{file}: {estimate['headline']}",
        *(f"{file}: {name}: {value}" for name, value in sums.items()),
    ]


def codes(data: Data) -> str:
    """Return the comparison of quantized values as tables, one for each runtime."""
    file = data["file"]
    return _rendered(*(part for run in data["runtimes"] for part in _codes_of_runtime(file, run)))


def _codes_of_runtime(file: str, run: Data) -> list[str | TextTable]:
    head = f"{file}: {run['version']}:"
    rows = [(q["quantizer"], q["differing"], q["compared"], q["steps"]) for q in run["quantizers"] if q["differing"]]
    facts = {
        "layers in integers": str(len(run["integer_layers"])),
        "layers in float": str(len(run["float_layers"])),
        "outputs, max abs difference": f"{run['output_difference']:.3g}",
    }
    if run["program_difference"] is not None:
        facts["outputs, max abs difference from the program"] = f"{run['program_difference']:.3g}"
    if run["saturating"]:
        facts["layers with saturating sums on this processor"] = ", ".join(run["saturating"])
    if run["remark"]:
        facts["remark"] = run["remark"]
    if run["not_compared"]:
        facts["not compared (the runtime merged their nodes)"] = ", ".join(run["not_compared"])
    if rows:
        facts["first difference"] = run["first_difference"]
    return [
        f"{head} {run['differing']} of {run['compared']} quantized values differ, by at most {run['steps']} steps",
        *(f"{head} {name}: {value}" for name, value in facts.items()),
        TextTable(("quantizer", "differing", "of", "steps"), rows, file, most=SHOWN),
    ]


def description(found: FileDescription) -> str:
    """Return the description of a file."""
    floats = [(layer.name, layer.op, layer.reason) for layer in found.layers if not layer.quantized]
    rows = [
        ("file", f"{found.path}, {found.bytes / 1024:.1f} KiB"),
        ("written by", found.producer),
        ("opset", _listed(found.opsets)),
        *(("input", each) for each in found.inputs),
        *(("output", each) for each in found.outputs),
        ("nodes", f"{found.quantize_nodes} QuantizeLinear, {found.dequantize_nodes} DequantizeLinear"),
        ("activations", _listed(found.activations) or "none quantized"),
        ("weights", _listed(found.weights) or "none quantized"),
        ("layers", f"{len(found.layers) - len(floats)} quantized, {len(floats)} float"),
    ]
    return _rendered(TextTable(("", ""), rows, found.path), TextTable(("float layer", "op", "why"), floats, found.path))


def quantized(data: Data) -> str:
    """Return the result of `quantize`, and the layers that stay in float."""
    file, codes, ranges = data["file"], data["codes"], data["ranges"]
    floats = [(each["layer"], each["kind"], each["reason"]) for each in data["layers"] if each["status"] == "float"]
    count = sum(each["status"] == "quantized" for each in data["layers"])
    return _rendered(
        f"{file}: {data['bytes'] / 1024:.1f} KiB, opset {data['opset']}, for {data['backend']}",
        f"{file}: {count} layers and ops quantized, {len(floats)} left in float",
        TextTable(("float layer", "kind", "why"), floats, file),
        f"{file}: {_count(ranges['quantizers'], 'range')} from {ranges['batches']} batches of data",
        *(f"{file}: {name}: {each['differing']} of {each['compared']} values differ" for name, each in codes.items()),
        *(f"{file}: in float by the config: {lost}" for lost in data["in_float"]),
        f"{file}: verdict: {data['verdict'] or 'none'}",
        *(f"{file}: {note}" for note in data["notes"]),
    )


def environment(data: Data) -> str:
    """Return the versions and the hardware."""
    torch, cuda = data["torch"], data["cuda"]
    rows = [
        ("qtoolkit", data["qtoolkit"]),
        ("python", data["python"]),
        ("torch", f"{torch['version']}, library built for {torch['library_built_for']}"),
        ("instruction set", f"{data['instruction_set']}, {_count(data['threads'], 'thread')}"),
        ("CUDA", f"{cuda['torch'] or 'not in this torch'}; devices: {', '.join(cuda['devices']) or 'none'}"),
        *((name, version or "not installed") for name, version in data["packages"].items()),
    ]
    return _rendered(TextTable(("", ""), rows))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _rendered(*parts: str | TextTable) -> str:
    """Return tables if stdout is a terminal and rich is installed; otherwise lines, never cut or wrapped."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return _on_terminal(parts)
    return "\n".join(line for part in parts for line in ([part] if isinstance(part, str) else part.lines()))


def _on_terminal(parts: Iterable[str | TextTable]) -> str:
    from rich.console import Console
    from rich.text import Text

    styled = not os.environ.get("NO_COLOR")
    written = io.StringIO()
    console = Console(file=written, width=shutil.get_terminal_size().columns, force_terminal=styled)
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part))
        elif part.rows:
            console.print(_rich(part))
            if len(part.rows) > part.most:
                console.print(Text(f"and {len(part.rows) - part.most} more"))
    return written.getvalue()


def _rich(table: TextTable) -> object:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(show_header=any(table.columns), show_lines=table.spaced)
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows[: table.most]:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    return drawn
