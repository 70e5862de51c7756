"""The encodings that SNPE and QNN take by `--quantization_overrides`: JSON in the form of AIMET 0.6.1.

An encoding is a list with an entry for each channel. `offset` is the lowest code relative to that of zero, so that `min` is
`offset * scale`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.errors import within
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Format, as_json, from_json, number, width

VERSION = "0.6.1"


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    parts: dict[str, Any] = {"version": VERSION, "activation_encodings": {}, "param_encodings": {}}
    for encoding in encodings:
        parts["param_encodings" if encoding.is_weight else "activation_encodings"][encoding.tensor] = _entries(encoding)
    return as_json(parts)


def _entries(encoding: Encoding) -> list[dict[str, Any]]:
    channels = zip(encoding.scale, encoding.zero_point, encoding.low, encoding.high, strict=True)
    return [
        {
            "bitwidth": encoding.bits,
            "dtype": "int",
            "is_symmetric": str(encoding.is_symmetric),
            "max": high,
            "min": low,
            "offset": encoding.qmin - zero_point,
            "scale": scale,
        }
        for scale, zero_point, low, high in channels
    ]


def _read(text: str, model: Any) -> list[Encoding]:
    found = []
    for part in ("activation_encodings", "param_encodings"):
        for tensor, entries in from_json(text, part).items():
            with within(f"{part}.{tensor}"):
                found.append(_encoding(tensor, entries, is_weight=part == "param_encodings"))
    return found


def _encoding(tensor: str, entries: object, is_weight: bool) -> Encoding:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"it must be a list of encodings, got {entries!r}.")
    first = entries[0]
    bits, symmetric = width(first, "bitwidth"), _is_symmetric(first)
    offsets = [number(entry, "offset", whole=True) for entry in entries]
    for entry in entries:
        if (number(entry, "bitwidth"), _is_symmetric(entry)) != (bits, symmetric):
            raise ValueError("all channels must have the same bitwidth and is_symmetric.")
    zero_points = tuple(0 if symmetric else -offset for offset in offsets)
    code_range = (offsets[0], (1 << bits - 1) - 1) if symmetric else (0, (1 << bits) - 1)
    scales = tuple(float32(number(entry, "scale")) for entry in entries)
    return Encoding(tensor, scales, zero_points, code_range[0], code_range[1], is_weight)


def _is_symmetric(entry: Mapping[str, Any]) -> bool:
    value = str(entry.get("is_symmetric"))
    if value not in ("True", "False"):
        raise ValueError(f"is_symmetric must be 'True' or 'False', got {value!r}.")
    return value == "True"


ENCODINGS = Format("Qualcomm's file of encodings", "_clip_ranges.json", _write, _read, bits=(4, 8, 16), channels=True)
