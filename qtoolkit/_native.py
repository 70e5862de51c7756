"""Loads the extension and its ops (`library`), or raises an error that says why it does not load."""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

REBUILD = "Rebuild it with the torch you run: pip install --no-build-isolation --force-reinstall --no-deps ."
MARK = rb"qtoolkit was built for torch ([0-9]+\.[0-9]+[0-9.]*)"


def built_for(library: Path) -> str | None:
    """Return the torch version that a library was built for, read from the file without loading it."""
    found = re.search(MARK, library.read_bytes())
    return found.group(1).decode() if found else None


def load() -> ModuleType:
    """Import `qtoolkit._C`.

    Raises:
        ImportError: The extension was not built, or was built for another version of torch.
    """
    spec = find_spec("qtoolkit._C")
    if spec is None or spec.origin is None:
        raise ImportError(
            "qtoolkit's native library is missing: the package was not built here. Run in its folder: "
            "pip install --no-build-isolation ."
        )
    built, running = built_for(Path(spec.origin)), torch.__version__.split("+")[0]
    if built is not None and built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(f"qtoolkit was built for torch {built}, but this is torch {running}. {REBUILD}")
    try:
        return import_module("qtoolkit._C")
    except ImportError as error:
        raise ImportError(
            f"qtoolkit's native library does not load under torch {running} ({error}). {REBUILD}"
        ) from None


load()
library = torch.ops.qtoolkit
