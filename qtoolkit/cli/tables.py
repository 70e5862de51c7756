"""Tables for people. Needs the extra [cli]."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from qtoolkit.extras import missing

WIDTH = 120  # where the output is no terminal
SHOWN = 20  # rows of quantizers that differ


def findings(data: dict[str, Any]) -> str:
    """Return the findings of lint as a table, and a line with their number."""
    rows = [
        (each["node"], each["rule"], f"{each['message']} {each['remedy']}", each["source"]) for each in data["findings"]
    ]
    counted = (
        f"{data['file']}: {_count(len(rows), 'finding')} for {data['backend']}; {_count(len(data['rules']), 'rule')}."
    )
    return counted if not rows else _rendered(_table(("node", "rule", "what, and what to do", "source"), rows), counted)


def codes(data: dict[str, Any]) -> str:
    """Return the comparison of codes as tables, one for each runtime."""
    parts: list[Any] = []
    for run in data["runtimes"]:
        rows = [
            (q["quantizer"], q["differing"], q["compared"], q["steps"]) for q in run["quantizers"] if q["differing"]
        ]
        parts.append(
            f"{run['version']}: {run['differing']} of {run['compared']} codes differ, by at most {run['steps']} steps"
        )
        parts.append(f"  layers in integers: {len(run['integer_layers'])}, in float: {len(run['float_layers'])}")
        parts.append(f"  outputs: largest difference {run['output_difference']:.3g}")
        if run["program_difference"] is not None:
            parts.append(f"  outputs: largest difference from the program {run['program_difference']:.3g}")
        if run["remark"]:
            parts.append(f"  {run['remark']}")
        if run["not_compared"]:
            parts.append(f"  not compared, as the runtime merged their nodes: {', '.join(run['not_compared'])}")
        if rows:
            parts.append(f"  first difference: {run['first_difference']}")
            parts.append(_table(("quantizer", "differing", "of", "steps"), rows[:SHOWN]))
            parts += [f"  and {len(rows) - SHOWN} more quantizers"] if len(rows) > SHOWN else []
    return _rendered(*parts)


def description(data: dict[str, Any]) -> str:
    """Return the description of a file."""
    quantized = sum(layer["quantized"] for layer in data["layers"])
    rows = [
        ("file", f"{data['file']}, {data['bytes'] / 1024:.1f} KiB"),
        ("written by", data["producer"]),
        ("opset", _listed(data["opsets"])),
        *(("input", _tensor(each)) for each in data["inputs"]),
        *(("output", _tensor(each)) for each in data["outputs"]),
        ("nodes", f"{data['quantize_nodes']} QuantizeLinear, {data['dequantize_nodes']} DequantizeLinear"),
        ("activations", _listed(data["activations"]) or "none quantized"),
        ("weights", _listed(data["weights"]) or "none quantized"),
        ("layers", f"{quantized} quantized, {len(data['layers']) - quantized} float"),
    ]
    floats = [(layer["layer"], layer["op"], layer["reason"]) for layer in data["layers"] if not layer["quantized"]]
    tables = [_table(("float layer", "op", "why"), floats)] if floats else []
    return _rendered(_table(("", ""), rows), *tables)


def environment(data: dict[str, Any]) -> str:
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
    return _rendered(_table(("", ""), rows))


def _tensor(tensor: dict[str, Any]) -> str:
    shape = "" if tensor["shape"] is None else f" [{', '.join(map(str, tensor['shape']))}]"
    return f"{tensor['name']}: {tensor['dtype']}{shape}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    _check_rich()
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=any(columns), show_lines=len(columns) == 4 and "source" in columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _rendered(*parts: Any) -> str:
    _check_rich()
    from rich.console import Console
    from rich.text import Text

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def _check_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise missing("a table (without --json)", "rich", "cli") from None
