"""Finds and loads the library of ops (`library`), or raises an error that says why it does not load."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = Path(__file__).parent
NAME = "_C.abi3.so"
REBUILD = (
    "Install the wheel for the torch you run, or build it with that torch in the folder of the sources: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)
MARK = rb"qtoolkit was built for torch ([0-9]+\.[0-9]+[0-9.]*)"

Op = Callable[..., Tensor]
TupleOp = Callable[..., tuple[Tensor, ...]]


def find(package: Path = PACKAGE) -> Path:
    """Return the library of a package's folder, or the installed one where Python runs in the repository's folder.

    `pip install .` compiles into the installed copy, and Python in the repository's folder imports the sources there.
    """
    if (package / NAME).exists():
        return package / NAME
    copies = (Path(entry or ".", "qtoolkit").absolute() for entry in sys.path)
    installed = next((copy for copy in copies if (copy / NAME).exists()), None)
    if installed is None:
        raise ImportError(
            f"qtoolkit's native library is missing: the package in {package} was not built. Type in {package.parent}: "
            f"pip install --no-build-isolation ."
        )
    if not _of_the_same_sources(package, installed):
        raise ImportError(
            f"qtoolkit's native library is missing: the package in {package} was not built, and the installed one in "
            f"{installed} is of other sources. To use the installed one, run Python in another folder. To install "
            f"these sources, type in {package.parent}: pip install --no-build-isolation ."
        )
    return installed / NAME


def _of_the_same_sources(package: Path, installed: Path) -> bool:
    """Whether an installed copy has the version of a source folder, and no C++ source there changed after it was installed."""
    sources = (file.stat().st_mtime for file in (package.parent / "csrc").rglob("*.*"))
    same_version = (installed / "version.py").read_bytes() == (package / "version.py").read_bytes()
    return same_version and max(sources, default=0) <= (installed / NAME).stat().st_mtime


def built_for(file: Path) -> str | None:
    """Return the torch version that a library was built for, read from the file without loading it."""
    found = re.search(MARK, file.read_bytes())
    return found.group(1).decode() if found else None


def load(file: Path) -> None:
    """Register the ops of a library with torch; ImportError if it was built for another version of torch."""
    built, running = built_for(file), torch.__version__.split("+")[0]
    if built is not None and built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(f"qtoolkit was built for torch {built}, but this is torch {running}. {REBUILD}")
    try:
        torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"qtoolkit's native library does not load under torch {running} ({error.__cause__ or error}). {REBUILD}"
        ) from None


FILE = find()
if FILE.parent != PACKAGE:
    sys.modules["qtoolkit"].__path__.append(str(FILE.parent))  # there, Python finds qtoolkit._snapshot
load(FILE)
library = torch.ops.qtoolkit
