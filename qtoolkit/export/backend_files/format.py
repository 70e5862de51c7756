"""Format: one kind of file that accompanies a float model and holds the grids of its tensors."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qtoolkit.errors import check_mapping, within
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Format:
    """One kind of file."""

    title: str  # its name in errors
    suffix: str  # what its name has behind the model's
    # returns the text of a file for the encodings that the format holds, with the model they belong to
    write: Callable[[Sequence[Encoding], "onnx.ModelProto"], str]
    # returns the encodings of a text, without names of quantizers. Raises ValueError for anything else
    read: Callable[[str, "onnx.ModelProto"], list[Encoding]]
    bits: tuple[int, ...] = (8,)  # widths of codes that it holds
    asymmetric: bool = True  # whether it holds zero points
    symmetric: bool = True  # whether it holds signed integers without a zero point
    channels: bool = False  # whether it holds a scale for each channel of a weight
    powers: bool = False  # whether its scales are powers of two
    logarithmic: bool = False  # whether its grids are logarithmic, not integers
    # the tensors that a model gives a place in the file; None if it has one for every tensor
    placed: Callable[[Sequence[Encoding], "onnx.ModelProto"], set[str]] | None = None
    # for a format without weights: the scales that the target computes from the values of a weight, over the axes of a
    # channel
    derive: Callable[[Array, tuple[int, ...]], Array] | None = None

    def holds(self, encoding: Encoding) -> bool:
        """Return whether the file has an entry for a tensor. Only weights whose grids the target derives have none."""
        return not encoding.is_weight or self.derive is None

    def held(self, encodings: Sequence[Encoding], model: "onnx.ModelProto") -> list[Encoding]:
        """Return the encodings that have an entry in the file of a model."""
        own = [encoding for encoding in encodings if self.holds(encoding)]
        placed = None if self.placed is None else self.placed(own, model)
        return [encoding for encoding in own if placed is None or encoding.tensor in placed]

    def check(self, encoding: Encoding) -> None:
        """Raise ValueError for a grid that neither the file can hold nor the target can derive from a weight."""
        reason = self._why_not(encoding)
        if reason:
            kind = "weight" if encoding.is_weight else "activation"
            raise ValueError(
                f"encodings: {self.title} cannot hold the grid of the {kind} {encoding.tensor!r} (quantizer "
                f"{encoding.quantizer!r}): {reason}; prepare the model with a config that fits, or deploy the Q/DQ file of "
                "export_onnx."
            )

    def _why_not(self, encoding: Encoding) -> str:
        if (encoding.format == "nnie") != self.logarithmic:
            return f"it supports only {'logarithmic' if self.logarithmic else 'integer'} grids"
        if encoding.bits not in self.bits:
            return f"it supports {' or '.join(map(str, self.bits))} bits, got {encoding.bits}"
        if encoding.axis is not None and not encoding.is_weight:
            return "it supports per-tensor scales for activations, got per-channel scales"
        held = self.channels or self.derive is not None
        if encoding.axis is not None and not held:
            return "it supports per-tensor scales, got per-channel scales"
        if encoding.group > 1 and encoding.axis is not None and self.holds(encoding):
            return "it supports channels along one axis, got the groups of a transposed convolution"
        if not encoding.is_symmetric and not self.asymmetric:
            return "it supports only signed integers without a zero point"
        if encoding.is_symmetric and not self.symmetric:
            return "it supports only unsigned integers with a zero point"
        if not encoding.is_symmetric and encoding.qmin != encoding.lowest:
            return "with a zero point it supports only full integer ranges, got narrow_range=True"
        if self.powers and any(math.frexp(scale)[0] != 0.5 for scale in encoding.scale):
            return f"it supports only power-of-two scales, got {encoding.scale[0]:g}"
        return ""

    def is_derived(self, encoding: Encoding, values: Array) -> bool:
        """Return whether the target computes the trained scales of a weight from its values, to a millionth."""
        if self.derive is None:
            return True
        if encoding.group > 1:
            values = values.reshape(encoding.group, -1, *values.shape[1:]).swapaxes(1, 2)
            values = values.reshape(-1, *values.shape[2:])
        axis = 0 if encoding.group > 1 else encoding.axis
        scales = self.derive(values, tuple(a for a in range(values.ndim) if a != axis))
        return bool(np.allclose(scales, encoding.scale, rtol=1e-6, atol=0))


def as_json(value: object) -> str:
    """Return the text of a JSON file."""
    return json.dumps(value, indent=4) + "\n"


def from_json(text: str, *keys: str) -> Mapping[str, object]:
    """Return the mapping at these keys of a JSON file.

    Raises ValueError: the text is not JSON, or has no mapping there.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of too many digits too
        raise ValueError(f"the file must be JSON: {str(error).rstrip('.')}.") from None
    place = "the file"
    for key in keys:
        value, place = _under(place, value, key), f"{place}'s {key!r}"
    return check_mapping(place, value)


def _under(place: str, value: object, key: str) -> object:
    entries = check_mapping(place, value)
    if key not in entries:
        raise ValueError(f"{place} must have the key {key!r}, got {', '.join(map(repr, entries)) or 'none'}.")
    return entries[key]


def read_each(
    entries: Mapping[str, object], read: Callable[[str, object], Iterable[Encoding]], place: str = ""
) -> list[Encoding]:
    """Return one encoding per entry; errors begin with `place` and the entry's key."""
    found: dict[str, Encoding] = {}
    for key, entry in entries.items():
        with within(f"{place}{key}"):
            found |= {encoding.tensor: encoding for encoding in read(key, entry)}
    return list(found.values())


def number(entry: object, key: str | None = None) -> float:
    """Return a number of a JSON file: the entry itself, or its value at a key. Raises ValueError: it is not a finite number."""
    return _number(entry, key, (int, float), "finite")


def whole(entry: object, key: str | None = None) -> int:
    """Return a whole number of a JSON file, as `number` does."""
    return int(_number(entry, key, (int,), "whole"))


def _number(entry: object, key: str | None, kinds: tuple[type[float], ...], word: str) -> float:
    value = entry if key is None else _under("an entry", entry, key)
    if not isinstance(value, kinds) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:  # NaN is not
        raise ValueError(f"{key or 'an entry'} must be a {word} number, got {value!r}.")
    return value


def width(entry: object, key: str) -> int:
    """Return the bit width in a JSON file. Raises ValueError: it is missing, or not a whole number in [2, 32]."""
    bits = whole(entry, key)
    if not 2 <= bits <= 32:
        raise ValueError(f"{key} must lie in [2, 32], got {bits}.")
    return bits
