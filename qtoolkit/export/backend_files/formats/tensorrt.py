"""TensorRT's files for implicit quantization: its calibration cache, and the ranges that MQBench's users set themselves.

The cache is the text that IInt8Calibrator.write_calibration_cache gives: a line with the version and the calibrator, then
`tensor: scale`, the scale as eight hexadecimal digits of a float32. TensorRT computes the scales of weights from their values:
the largest magnitude of an output channel, divided by 127. (NVIDIA's documentation, "Working with Quantized Types".)
"""

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Array, Format, as_json, from_json, number

HEADER = "TRT-100000-EntropyCalibration2"
_LARGEST = 127  # the code of the highest value of a dynamic range


def _cache(encodings: Sequence[Encoding], model: Any) -> str:
    lines = (f"{encoding.tensor}: {struct.pack('>f', encoding.scale[0]).hex()}" for encoding in encodings)
    return "\n".join((HEADER, *lines)) + "\n"


def _read_cache(text: str, model: Any) -> list[Encoding]:
    head, *lines = text.splitlines() or [""]
    if not re.fullmatch(r"TRT-\d+-\w+", head):
        raise ValueError(f"a calibration cache must begin with a line like {HEADER!r}, got {head!r}.")
    found = []
    for line in lines:
        tensor, colon, digits = line.rpartition(": ")
        if not colon or not re.fullmatch("[0-9a-f]{8}", digits):
            raise ValueError(f"a line must be a tensor, a colon and eight hexadecimal digits, got {line!r}.")
        found.append(_signed(tensor, struct.unpack(">f", bytes.fromhex(digits))[0]))
    return found


def _ranges(encodings: Sequence[Encoding], model: Any) -> str:
    ranges = {encoding.tensor: encoding.scale[0] * _LARGEST for encoding in encodings}
    return as_json({"tensorrt": {"blob_range": ranges}})


def _read_ranges(text: str, model: Any) -> list[Encoding]:
    ranges = from_json(text, "tensorrt", "blob_range")
    return [_signed(tensor, number(end) / _LARGEST) for tensor, end in ranges.items()]


def _signed(tensor: str, scale: float) -> Encoding:
    return Encoding(tensor, (float32(scale),), (0,), -128, 127)


def _derived(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(np.abs(values).max(axes) / _LARGEST)


CACHE = Format(
    "TensorRT's calibration cache", "_calibration.cache", _cache, _read_cache, asymmetric=False, derive=_derived
)
RANGES = Format(
    "the file of TensorRT's dynamic ranges",
    "_clip_ranges.json",
    _ranges,
    _read_ranges,
    asymmetric=False,
    derive=_derived,
)
