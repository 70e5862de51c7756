"""Loads the library of ops (`library`), or raises an error that says why it does not load."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("_C.abi3.so")
REBUILD = (
    "Install the wheel for the torch you run, or build it with that torch in the folder of the sources: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)
MARK = rb"qtoolkit was built for torch ([0-9]+\.[0-9]+[0-9.]*)"

Op = Callable[..., Tensor]
TupleOp = Callable[..., tuple[Tensor, ...]]


def built_for(file: Path) -> str | None:
    """Return the torch version that a library was built for, read from the file without loading it."""
    found = re.search(MARK, file.read_bytes())
    return found.group(1).decode() if found else None


def load(file: Path = FILE) -> None:
    """Register the ops of a library with torch; ImportError if it was not built, or was built for another version of torch."""
    if not file.exists():
        raise ImportError(
            "qtoolkit's native library is missing: the package was not built here. Run in its folder: "
            "pip install --no-build-isolation ."
        )
    built, running = built_for(file), torch.__version__.split("+")[0]
    if built is not None and built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(f"qtoolkit was built for torch {built}, but this is torch {running}. {REBUILD}")
    try:
        torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"qtoolkit's native library does not load under torch {running} ({error.__cause__ or error}). {REBUILD}"
        ) from None


load()
library = torch.ops.qtoolkit
