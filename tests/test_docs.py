"""The Python programs of the pages in docs/, run as they stand."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {
    f"{page.name}-{number}": program
    for page in sorted(DOCS.glob("*.md"))
    if page.name != "migration.md"  # its program registers modules under another package's name
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
}
NEEDS = {
    "distributed.md-0": "safetensors",
    "mixed_precision.md-0": "scipy",
    "training.md-2": "accelerate",
    "training.md-3": "lightning",
    "training.md-4": "transformers",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program: str, tmp_path, monkeypatch) -> None:
    if program in NEEDS:
        pytest.importorskip(NEEDS[program], reason=f"needs {NEEDS[program]}, which is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[program], program, "exec"), {"__name__": program})
