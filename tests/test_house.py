"""Rules of the house that no single module can show: which packages a module may import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import qtoolkit

HOME = Path(qtoolkit.__file__).parent
FILES = {
    ".".join(("qtoolkit", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
}


def imports_of(module: str) -> Iterator[str]:
    """Yield the modules of qtoolkit that a module imports: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            if name == "qtoolkit" or name.startswith("qtoolkit."):
                yield name if name in FILES else name.rpartition(".")[0]


def is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@pytest.mark.parametrize("module", [module for module in FILES if not is_in(module, "qtoolkit.compat")])
def test_the_core_imports_nothing_of_compat(module: str) -> None:
    assert [name for name in imports_of(module) if is_in(name, "qtoolkit.compat")] == []
