"""The ranges that OpenPPL takes, in the form in which MQBench writes them: JSON with an entry for each tensor.

MQBench wrote a text of largest magnitudes for its backend PPLCUDA, which lost the zero points.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.errors import within
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Format, as_json, from_json, number, width

_LISTS = {"step": "scale", "zero_point": "zero_point", "min": "low", "max": "high"}


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    return as_json({"ppl": {encoding.tensor: _entry(encoding) for encoding in encodings}})


def _entry(encoding: Encoding) -> dict[str, Any]:
    lists = {key: list(getattr(encoding, attribute)) for key, attribute in _LISTS.items()}
    values = lists if encoding.axis is not None else {key: one for key, (one,) in lists.items()}
    return {**values, "bit": encoding.bits, "type": "biased"}


def _read(text: str, model: Any) -> list[Encoding]:
    weights = {tensor.name for tensor in model.graph.initializer}
    found = []
    for tensor, entry in from_json(text, "ppl").items():
        with within(tensor):
            found.append(_encoding(tensor, entry, tensor in weights))
    return found


def _encoding(tensor: str, entry: Mapping[str, Any], is_weight: bool) -> Encoding:
    lists = {key: _as_list(entry, key) for key in _LISTS}
    if len({len(values) for values in lists.values()}) != 1 or not lists["step"]:
        raise ValueError(f"{', '.join(_LISTS)} must be numbers, or lists of one length.")
    scales = tuple(float32(number(one)) for one in lists["step"])
    zero_points = tuple(number(one, whole=True) for one in lists["zero_point"])
    low, bits = number(lists["min"][0]), width(entry, "bit")
    qmin = round(number(low / scales[0])) + zero_points[0]
    qmax = (1 << bits) - 1 if qmin >= 0 else (1 << bits - 1) - 1
    return Encoding(tensor, scales, zero_points, qmin, qmax, is_weight)


RANGES = Format("PPL's file of ranges", "_clip_ranges.json", _write, _read, bits=tuple(range(2, 17)), channels=True)


def _as_list(entry: Mapping[str, Any], key: str) -> list[Any]:
    values = entry.get(key) if isinstance(entry, Mapping) else None
    return values if isinstance(values, list) else [number(entry, key)]
