"""The pages that `make docs` builds: what they must name, by what is in the package."""

import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

import qtoolkit as qt

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("api/*.md")), flags=re.MULTILINE)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module that are neither modules nor tables."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return [name for name in names if getattr(getattr(module, name), "__module__", None) and callable(getattr(module, name))]


def shown(target: str) -> list[object]:
    """Return what a line of the reference shows. A function behind a submodule of its own name has a line of its own."""
    found = resolve_name(target)
    if not isinstance(sys.modules.get(target), ModuleType):
        return [found]
    module = sys.modules[target]
    return [getattr(module, name) for name in names_of(module) if f"{target}.{name}" not in sys.modules]


@pytest.mark.parametrize("module", [qt, qt.nn, qt.ops, qt.tuning, qt.tuning.mixed_precision, qt.export, qt.debug])
def test_the_reference_shows_every_public_name(module: ModuleType) -> None:
    everything = [item for target in REFERENCE for item in shown(target)]
    assert [name for name in names_of(module) if getattr(module, name) not in everything] == []
