"""The Python programs of the pages in docs/, and the notebooks, run as they stand."""

import re
from pathlib import Path

import pytest

from tests.data import DATA

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {
    f"{page.name}-{number}": program
    for page in sorted(DOCS.rglob("*.md"))
    if page.name != "migration.md"  # its program registers modules under another package's name
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
}
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
EXTRAS = re.compile(
    r"^(?:import|from) (?:torch\.utils\.)?(accelerate|lightning|tensorboard|transformers)\b", re.MULTILINE
)

NEEDED_BY = {"MixedPrecision": "scipy", "save_checkpoint": "safetensors"}  # names of ours that need an extra


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_run(program: str, tmp_path, monkeypatch) -> None:
    text = PROGRAMS[program]
    for package in [*EXTRAS.findall(text), *(needed for name, needed in NEEDED_BY.items() if name in text)]:
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, program, "exec"), {"__name__": program})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_are_kept_without_outputs_and_run(notebook: Path, tmp_path, monkeypatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which is not installed")
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == "python3"
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
    monkeypatch.chdir(tmp_path)
    if DATA is not None:  # a notebook looks for shared/data here; without it, it draws images
        (tmp_path / "data").symlink_to(DATA)
    names: dict[str, object] = {"__name__": notebook.stem}
    for number, cell in enumerate(code):
        exec(compile(cell.source, f"{notebook.name}, cell {number}", "exec"), names)
    assert "assert" in code[-1].source
