"""`qtoolkit examples`: the scripts are copied into a new folder, with a line on each."""

from pathlib import Path

import pytest

import qtoolkit_command

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_examples_are_copied_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scripts"
    assert qtoolkit_command.copy_examples(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len([*folder.rglob("*.py")]) >= 7
    assert any(line.startswith(f"{folder / 'digits.py'}: From a float CNN") for line in lines)
    program = Path("cpp_inference", "main.cpp")
    assert (folder / program).read_text() == (EXAMPLES / program).read_text()


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("1")
    assert qtoolkit_command.copy_examples(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert "exists; name a new folder" in capsys.readouterr().err
