"""The README's program, run as it stands; and the files that docs/design/map.md and docs/contributing.md name."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_program_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(program, str(README), "exec"), {})
    out = capsys.readouterr().out
    assert (tmp_path / "model.onnx").exists()
    assert "weight codes:     0 of" in out
    assert "end to end: 0 of" in out
    assert re.search(r"in float: +none;", out)
    assert len([line for line in program.splitlines() if line]) <= 30


def test_the_map_names_what_exists() -> None:
    table = (README.parent / "docs" / "design" / "map.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.\w+)?)`", table):
        root = README.parent
        assert any((root / folder / name).exists() for folder in ("", "csrc", "qtoolkit", "benchmarks")), name


def test_the_page_on_changes_names_what_exists() -> None:
    text = (README.parent / "docs" / "contributing.md").read_text()
    paths = re.findall(r"`((?:qtoolkit|tests|docs)/[\w/]*(?:\.\w+)?)`", text)
    assert len(paths) > 20
    for path in paths:
        assert (README.parent / path).exists(), path
    for section in re.split(r"\n## ", text)[1:8]:  # each change touches three files at most
        assert 2 <= len([line for line in section.splitlines() if line.startswith("|")]) - 2 <= 3, section
