"""Tengine's table of activations: a line `tensor scale zero_point` for each, uint8.

Tengine's quantization tool computes the grids of weights from their values, between the lowest and the highest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Array, Format

_STEPS = 255


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    lines = (f"{one.tensor} {one.scale[0]!r} {one.unsigned_zero_point[0]}" for one in encodings)
    return "".join(line + "\n" for line in lines)


def _read(text: str, model: Any) -> list[Encoding]:
    found = []
    for line in text.splitlines():
        try:
            tensor, scale, zero_point = line.rsplit(" ", 2)
            found.append(Encoding(tensor, (float32(float(scale)),), (int(zero_point),), 0, _STEPS))
        except ValueError as error:
            raise ValueError(
                f"a line must be a tensor, a scale and a zero point, got {line!r}: {str(error).rstrip('.')}."
            ) from None
    return found


def _derived(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray((np.maximum(values, 0).max(axes) - np.minimum(values, 0).min(axes)) / _STEPS)


TABLE = Format("Tengine's table of scales", "_for_tengine.scale", _write, _read, symmetric=False, derive=_derived)
