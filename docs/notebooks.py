"""Runs the notebooks of docs/tutorials and keeps what their cells print and draw. See also tests/test_notebooks.py.

python docs/notebooks.py [NAME ...]    writes the outputs into the notebooks, of all by default
"""

import ast
import base64
import contextlib
import io
import linecache
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parent / "tutorials"


def executed(notebook: Path) -> tuple[Any, dict[str, Any]]:
    """Run a notebook in the working folder, and return it with its outputs, and the names that it has then."""
    content, names = nbformat.read(notebook, as_version=4), {"__name__": notebook.stem}
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    drawn()  # closes what others have left open
    for number, cell in enumerate(code, start=1):
        cell.outputs = outputs_of(cell.source, f"{notebook.name}, cell {number}", names)
    return content, names


def outputs_of(source: str, name: str, names: dict[str, Any]) -> list[Any]:
    """Run a cell and return what it prints, what its last line gives, and what it draws."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # errors show lines of the cell
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed.getvalue())] if printed.getvalue() else []
    pictures = drawn()
    if value is not None and not pictures:
        outputs.append(nbformat.v4.new_output("execute_result", {"text/plain": repr(value)}))
    return outputs + [nbformat.v4.new_output("display_data", {"image/png": picture}) for picture in pictures]


def drawn() -> list[str]:
    """Close the figures of matplotlib, and return them as PNG in base64."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    pictures = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        pictures.append(base64.b64encode(buffer.getvalue()).decode())
    pyplot.close("all")
    return pictures


def main() -> None:
    """Run notebooks in an empty folder, and write them with their outputs."""
    os.environ["MPLBACKEND"] = "agg"
    for notebook in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            content, _ = executed(notebook)
        nbformat.validate(content)
        notebook.write_text(nbformat.writes(content) + "\n")
        print(notebook)


if __name__ == "__main__":
    main()
