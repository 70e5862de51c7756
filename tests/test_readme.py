"""The README's program, run as it stands."""

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
    assert len([line for line in program.splitlines() if line]) <= 30


def test_the_map_names_what_exists() -> None:
    text = README.read_text()
    table = text[text.index("## Map of the house") : text.index("**Add an op**")]
    for name in re.findall(r"`([\w/]+(?:\.\w+)?)`", table):
        root = README.parent
        assert any((root / folder / name).exists() for folder in ("", "csrc", "qtoolkit", "benchmarks")), name
