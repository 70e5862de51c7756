"""The programs of docs/tuning.md, run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
PROGRAMS = dict(re.findall(r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.mark.parametrize("section", PROGRAMS)
def test_programs_run(section: str) -> None:
    exec(compile(PROGRAMS[section], f"docs/tuning.md: {section}", "exec"), {})
