"""Target: what a backend's compiler takes."""

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
    """What a backend takes: its files are named by a path without an ending, and suffixes of their own."""

    @abstractmethod
    def write(self, export: Write, opset: int, path: Path) -> "BackendFiles":
        """Write the files for what `export` returns, whose argument replaces the placeholders in the graph."""

    @abstractmethod
    def read(self, path: Path) -> list[Encoding]:
        """Read the encodings of the files."""


@dataclass(frozen=True)
class BackendFiles:
    """What `encodings` returns.

    Attributes:
        model: The file of the model.
        files: The files of the grids.
        encodings: The grids in them.
    """

    model: Path
    files: tuple[Path, ...]
    encodings: tuple[Encoding, ...]


def with_ending(path: Path, ending: str) -> Path:
    """Return a path with an ending behind its name."""
    return path.with_name(path.name + ending)


def check_same(title: str, held: Iterable[Encoding], read: Iterable[Encoding]) -> None:
    """Raise RuntimeError unless a file, read again, has the encodings that it should hold."""
    ours, theirs = ({encoding.tensor: encoding for encoding in encodings} for encodings in (held, read))
    differing = [
        n for n in ours.keys() | theirs.keys() if not (n in ours and n in theirs and ours[n].has_grid_of(theirs[n]))
    ]
    if differing:
        raise RuntimeError(
            f"encodings: {title} does not hold the grids of {', '.join(sorted(differing))}: read back, they differ. This is a "
            f"bug of qtoolkit; please report it with the model."
        )
