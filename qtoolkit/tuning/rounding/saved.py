"""The folder of finished units, from which an interrupted run can resume."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from qtoolkit.files import write_atomically
from qtoolkit.quantizers.tensor_quantizer import quantizers_of


class UnitState(TypedDict):
    """The weights of a unit and the grids of its activations, by name."""

    weights: dict[str, Tensor]
    follows: dict[str, bool]  # whether the range of each quantizer follows what it quantizes
    grids: dict[str, tuple[Tensor, Tensor | None]]


class FinishedUnit(UnitState):
    """The state of a finished unit, with the fields of its UnitResult."""

    result: dict[str, Any]


class SavedUnits:
    """Files of finished units, one each, written atomically; they are bound to the initial model and to the options."""

    def __init__(self, folder: str | os.PathLike[str] | None, model: nn.Module, options: str) -> None:
        self.folder = None if folder is None else Path(folder)
        self.key = "" if self.folder is None else _key_of(model, options)

    def load(self, place: int) -> FinishedUnit | None:
        """Return the saved state of the unit with this index, or None.

        Raises ValueError: it was saved for another model, or with other options; or the file is damaged.
        """
        file = self._file(place)
        if file is None or not file.exists():
            return None
        content = io.BytesIO(file.read_bytes())  # errors of the file system are raised here
        try:
            saved = torch.load(content, weights_only=True)
        except Exception as error:  # of many types, OSError too where a damaged file names a place outside of it
            raise ValueError(f"reconstruct: {str(file)!r} is damaged; remove it to learn its unit again.") from error
        key = saved.pop("key", None) if isinstance(saved, dict) else None
        if key != self.key:
            raise ValueError(
                f"reconstruct: {str(file)!r} belongs to another model, calibration or set of options; pass another path, or "
                "remove that folder to start again."
            )
        unit: FinishedUnit = saved
        return unit

    def save(self, place: int, content: FinishedUnit) -> None:
        """Save the result of the unit with this index."""
        file = self._file(place)
        if file is not None:
            buffer = io.BytesIO()
            torch.save({**content, "key": self.key}, buffer)
            write_atomically(buffer.getvalue(), file)

    def _file(self, place: int) -> Path | None:
        return None if self.folder is None else self.folder / f"unit-{place:04d}.pt"


def _key_of(model: nn.Module, options: str) -> str:
    digest = hashlib.sha256(options.encode())
    for name, quantizer in quantizers_of(model).items():  # the state dict has no switches
        digest.update(f"{name} {quantizer.spec.describe()} {quantizer.quantizing}".encode())
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
