"""What a benchmark leaves: rows in a file of results, to which later runs add, and a part of a page between two marks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import present_command


def rows_before(out: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file of results, which must have been made with the same settings; none if there is no file.

    Raises:
        SystemExit: A setting of the file is another one.
    """
    if not out.exists():
        return []
    found = json.loads(out.read_text())
    for name, value in settings.items():
        if found.get(name) != value:
            raise SystemExit(
                f"{out} has results with {name} = {found.get(name)!r}, and this run has {value!r}; pass another file as --out."
            )
    return list(found["rows"])


def commands_of(out: Path) -> list[str]:
    """Return the commands that made a file of results, and the present one."""
    before = json.loads(out.read_text())["commands"] if out.exists() else []
    return list(dict.fromkeys([*before, present_command()]))


def made_by(results: Mapping[str, Any]) -> str:
    """Return the commands of a file of results as code in markdown."""
    return ", ".join(f"`{command}`" for command in results["commands"])


def write_rows(out: Path, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write facts and rows; a run that is ended while it writes leaves the file as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _replace(out, json.dumps({**results, "rows": rows}, indent=1) + "\n")


def _replace(out: Path, text: str) -> None:
    fresh = out.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(out)


def write_part(page: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Replace what a page has between the mark `begin` and the next mark `end`, whole or not at all.

    Raises:
        SystemExit: The page does not have `begin` once, with `end` behind it.
    """
    text = page.read_text()
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        raise SystemExit(f"{page} must have the line {begin!r} once, and the line {end!r} after it.")
    before, rest = text.split(begin)
    _replace(page, "\n".join([before + begin, *lines, end + rest.split(end, 1)[1]]))
