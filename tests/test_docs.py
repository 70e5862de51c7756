"""The Python programs of the pages in docs/ run as they stand."""

from pathlib import Path

import pytest

from tests import pages

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {
    f"{page.name}-{number}": program
    for page in sorted(DOCS.rglob("*.md"))
    for number, program in enumerate(pages.blocks("python", page.read_text()))
    if ".install()" not in program  # which registers modules under another package's name
}


SLOW = ("detection.md-0", "timm.md-0", "hugging_face.md-1", "export.md-3")


@pytest.mark.parametrize("program", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in PROGRAMS])
def test_the_programs_run(program: str, tmp_path, monkeypatch) -> None:
    text = PROGRAMS[program]
    for package in pages.needed(text):
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, program, "exec"), {"__name__": program})
