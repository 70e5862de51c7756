"""Target: the files that a backend's compiler accepts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qtoolkit.export.backend_files.encoding import Encoding

if TYPE_CHECKING:
    import onnx_ir

Write = Callable[[Callable[["onnx_ir.Model"], None]], "onnx_ir.Model"]


class Target(ABC):
    """The files that a backend accepts. Each file name is a base path plus a suffix."""

    @abstractmethod
    def write(self, export: Write, opset: int, path: Path) -> "BackendFiles":
        """Write the files of the model that `export` returns; its argument replaces the placeholders in the graph."""

    @abstractmethod
    def read(self, path: Path) -> list[Encoding]:
        """Read the encodings of the files."""


@dataclass(frozen=True)
class BackendFiles:
    """The result of `encodings`.

    Attributes:
        model: The file of the model.
        files: The files of the grids.
        encodings: The grids in them.
    """

    model: Path
    files: tuple[Path, ...]
    encodings: tuple[Encoding, ...]


def with_ending(path: Path, ending: str) -> Path:
    """Return a path with a suffix appended to its name."""
    return path.with_name(path.name + ending)


def check_same(title: str, held: Iterable[Encoding], read: Iterable[Encoding]) -> None:
    """Raise RuntimeError if a file, read again, does not have the expected encodings."""
    ours, theirs = ({encoding.tensor: encoding for encoding in encodings} for encodings in (held, read))
    differing = [
        n for n in ours.keys() | theirs.keys() if not (n in ours and n in theirs and ours[n].has_grid_of(theirs[n]))
    ]
    if differing:
        raise RuntimeError(
            f"encodings: {title} does not hold the grids of {', '.join(sorted(differing))}: they differ when the file is read "
            "again. This is a bug in qtoolkit; please report it with the model."
        )
