"""Results as tables on the console, as markdown and as JSON."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import qtoolkit
from benchmarks.measure import Row
from qtoolkit._native import library

ROOT = Path(__file__).parents[1]
NOISY = 0.3  # an interquartile range above this share of the median is marked
KEPT_TITLE = "kept for backward, bytes an element (fixed / learned scale); goal: 1/8 with a fixed scale"


@dataclass(frozen=True)
class Results:
    """All that a run says: where and how it ran, times as rows, and bytes kept for backward by tool."""

    facts: Mapping[str, object]
    rows: Sequence[Row]
    kept: Mapping[str, Mapping[str, float]]

    @property
    def head(self) -> str:
        """One line about where it ran."""
        f = self.facts
        cpu = f"{f['cpu']}, {f['cores']} cores, {f['instruction_set']}"
        return f"{f['device']}; {cpu}; torch {f['torch']}; multiples of the roof, ~ where the times spread by more than 30 %"

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Title, names of columns and cells of each table."""
        for group in dict.fromkeys(row.group for row in self.rows):
            rows = [row for row in self.rows if row.group == group]
            names = list(dict.fromkeys(name for row in rows for name in row.ratios))
            cells = [[*_head(row), *(_number(row.ratios.get(name)) for name in names)] for row in rows]
            yield f"{group}; goal: {rows[0].goal}", ["tensor", "threads", "roof, us", *names], cells
        names = list(dict.fromkeys(name for of_tool in self.kept.values() for name in of_tool))
        kept = [[tool, *(_number(of_tool.get(name), 3) for name in names)] for tool, of_tool in self.kept.items()]
        yield KEPT_TITLE, ["tool", *names], kept

    def show(self, console: Console) -> None:
        """Print all tables."""
        console.print(self.head)
        for title, names, cells in self.tables():
            show(console, title, names, cells)

    def markdown(self) -> str:
        """All tables as markdown."""
        lines = ["# The ops against the memory roof", "", f"{self.head}. Made by `{self.facts['command']}`.", ""]
        if self.facts["peers"]:
            versions = ", ".join(f"{name} {version}" for name, version in self.facts["peers"].items())
            lines += [f"Peers: {versions}.", ""]
        for title, names, cells in self.tables():
            lines += [f"## {title.split('; goal: ')[0]}", "", f"Goal: {title.split('; goal: ')[1]}.", ""]
            lines += [*markdown_lines(names, cells), ""]
        return "\n".join(lines)

    def json(self) -> dict[str, object]:
        """Everything, as plain values."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows], "kept_bytes": self.kept}


LEFT = (
    "tensor",
    "tool",
    "network",
    "what is trained",
    "demand",
    "verdict",
    "best peer",
    "op",
    "why there is no figure",
)


def show(console: Console, title: str, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right")
    for line in cells:
        table.add_row(*line)
    console.print(table)


def markdown_lines(names: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in markdown."""
    return [_line(names), "|---" * len(names) + "|", *map(_line, cells)]


def _head(row: Row) -> list[str]:
    noisy = " ~" if row.spread > NOISY else ""
    return [row.name, str(row.threads), f"{row.roof_us:.1f}{noisy}"]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def present_command() -> str:
    """Return the command that runs now as one types it: `python -m benchmarks.pages.ops --quick`."""
    script = Path(sys.argv[0]).resolve().with_suffix("")
    parts = script.relative_to(ROOT).parts if script.is_relative_to(ROOT) else (script.name,)
    return shlex.join(["python", "-m", ".".join(parts), *sys.argv[1:]])


def facts(device: str) -> dict[str, object]:
    """What the machine, the processor, torch and the library are."""
    return {
        "machine": platform.platform(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "device": "CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        "instruction_set": library.instruction_set(),
        "torch": torch.__version__,
    }


def processor_features() -> list[str]:
    """Return what of the processor decides how fast integers are, by Linux' names; nothing elsewhere."""
    named = re.search(r"^flags\s*: (.*)$", _cpuinfo(), flags=re.MULTILINE)
    found = set(named[1].split()) if named else set()
    return [name for name in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8") if name in found]


def versions() -> dict[str, str]:
    """Return the versions of what is measured, as far as it is installed."""
    others = {name: _version(name) for name in ("torchvision", "timm", "onnxruntime")}
    ours = {"python": platform.python_version(), "qtoolkit": qtoolkit.__version__, "torch": torch.__version__}
    return {**ours, **{name: number for name, number in others.items() if number}}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    named = re.search(r"^model name\s*: (.*)$", _cpuinfo(), flags=re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def _cpuinfo() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""
