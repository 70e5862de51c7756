"""File formats that also hold the grids of weights: for Qualcomm's compilers, OpenPPL, Vitis AI and STPU."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from qtoolkit.errors import check_mapping
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.format import Format, as_json, from_json, number, read_each, whole, width
from qtoolkit.export.files.kinds import WEIGHTED

if TYPE_CHECKING:
    import onnx


def _weights_in(model: "onnx.ModelProto") -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


# ---- Qualcomm: the encodings that SNPE and QNN take by `--quantization_overrides`, JSON in the form of AIMET 0.6.1.
# An encoding is a list with an entry for each channel. `offset` is the lowest integer minus the zero point, so that `min` is
# `offset * scale`.

VERSION = "0.6.1"
PARTS = {"activation_encodings": False, "param_encodings": True}  # whether they are of weights


def _write_qualcomm(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    parts = {part: {e.tensor: _entries(e) for e in encodings if e.is_weight == of} for part, of in PARTS.items()}
    return as_json({"version": VERSION, **parts})


def _entries(encoding: Encoding) -> list[dict[str, object]]:
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


def _read_qualcomm(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    found = []
    for part, of_weights in PARTS.items():
        found += read_each(from_json(text, part), partial(_of_entries, is_weight=of_weights), f"{part}.")
    return found


def _of_entries(tensor: str, entries: object, is_weight: bool) -> list[Encoding]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"it must be a list of encodings, got {entries!r}.")
    first = entries[0]
    bits, symmetric = width(first, "bitwidth"), _is_symmetric(first)
    offsets = [whole(entry, "offset") for entry in entries]
    for entry in entries:
        if (number(entry, "bitwidth"), _is_symmetric(entry)) != (bits, symmetric):
            raise ValueError("all channels must have the same bitwidth and is_symmetric.")
    zero_points = tuple(0 if symmetric else -offset for offset in offsets)
    code_range = (offsets[0], (1 << bits - 1) - 1) if symmetric else (0, (1 << bits) - 1)
    scales = tuple(float32(number(entry, "scale")) for entry in entries)
    return [Encoding(tensor, scales, zero_points, *code_range, is_weight)]


def _is_symmetric(entry: object) -> bool:
    value = str(check_mapping("an entry", entry).get("is_symmetric"))
    if value not in ("True", "False"):
        raise ValueError(f"is_symmetric must be 'True' or 'False', got {value!r}.")
    return value == "True"


QUALCOMM = Format(
    "Qualcomm's file of encodings", "_clip_ranges.json", _write_qualcomm, _read_qualcomm, bits=(4, 8, 16), channels=True
)

# ---- OpenPPL: ranges in the form in which MQBench writes them, JSON with an entry for each tensor.
# MQBench wrote a text of largest magnitudes for its backend PPLCUDA, which lost the zero points.

_LISTS = {"step": "scale", "zero_point": "zero_point", "min": "low", "max": "high"}


def _write_ppl(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    return as_json({"ppl": {encoding.tensor: _entry(encoding) for encoding in encodings}})


def _entry(encoding: Encoding) -> dict[str, object]:
    lists = {key: list(getattr(encoding, attribute)) for key, attribute in _LISTS.items()}
    values = lists if encoding.axis is not None else {key: one for key, (one,) in lists.items()}
    return {**values, "bit": encoding.bits, "type": "biased"}


def _read_ppl(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    weights = _weights_in(model)
    return read_each(from_json(text, "ppl"), partial(_of_lists, weights=weights))


def _of_lists(tensor: str, entry: object, weights: Collection[str]) -> list[Encoding]:
    lists: dict[str, list[object]] = {key: _as_list(entry, key) for key in _LISTS}
    if len({len(values) for values in lists.values()}) != 1 or not lists["step"]:
        raise ValueError(f"{', '.join(_LISTS)} must be numbers, or lists of one length.")
    scales = tuple(float32(number(one)) for one in lists["step"])
    zero_points = tuple(whole(one) for one in lists["zero_point"])
    low, bits = number(lists["min"][0]), width(entry, "bit")
    qmin = round(number(low / scales[0])) + zero_points[0]
    qmax = (1 << bits) - 1 if qmin >= 0 else (1 << bits - 1) - 1
    return [Encoding(tensor, scales, zero_points, qmin, qmax, tensor in weights)]


def _as_list(entry: object, key: str) -> list[object]:
    values = entry.get(key) if isinstance(entry, Mapping) else None
    return values if isinstance(values, list) else [number(entry, key)]


PPL = Format(
    "PPL's file of ranges", "_clip_ranges.json", _write_ppl, _read_ppl, bits=tuple(range(2, 17)), channels=True
)

# ---- Vitis AI's DPU: scales in the form that MQBench's converter to xmodel reads, JSON, a power of two for each tensor.


def _write_vitis(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    return as_json({"vitis": {encoding.tensor: {"scale": encoding.scale[0]} for encoding in encodings}})


def _read_vitis(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    weights = _weights_in(model)

    def read(tensor: str, entry: object) -> list[Encoding]:
        return [Encoding(tensor, (float32(number(entry, "scale")),), (0,), -128, 127, tensor in weights)]

    return read_each(from_json(text, "vitis"), read)


VITIS = Format("Vitis's file of scales", "_clip_ranges.json", _write_vitis, _read_vitis, asymmetric=False, powers=True)

# ---- STPU: JSON with the ranges of tensors (weights by their node) and the steps of biases. Codes lie in [-127, 127].
# MQBench's files also have exponents named `emin`, for which there is no description.

_LARGEST = 127


def _write_stpu(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    by_tensor = {encoding.tensor: encoding for encoding in encodings}
    ranges: dict[str, dict[str, float]] = {one.tensor: _range(one) for one in encodings if not one.is_weight}
    for key, node in _layers(model):
        weight, source = by_tensor.get(node.input[1]), by_tensor.get(node.input[0])
        if weight is not None:
            ranges[key] = _range(weight)
        if weight is not None and source is not None and len(node.input) > 2:
            ranges[f"{node.name}_bias"] = {"alpha": weight.scale[0] * source.scale[0], "zero_point": 0}
    return as_json(ranges)


def _layers(model: "onnx.ModelProto") -> Iterator[tuple[str, "onnx.NodeProto"]]:
    """Yield the key of each layer's weight, and its node."""
    return ((f"{node.name}_weights", node) for node in model.graph.node if node.op_type in WEIGHTED)


def _range(encoding: Encoding) -> dict[str, float]:
    return {"min": -_LARGEST * encoding.scale[0], "max": _LARGEST * encoding.scale[0]}


def _read_stpu(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    weights = {key: node.input[1] for key, node in _layers(model)}

    def read(key: str, entry: object) -> list[Encoding]:
        if isinstance(entry, dict) and "alpha" in entry:  # of a bias
            return []
        scale = float32(number(entry, "max") / _LARGEST)
        return [Encoding(weights.get(key, key), (scale,), (0,), -_LARGEST, _LARGEST, key in weights)]

    return read_each(from_json(text), read)


STPU = Format("STPU's file of ranges", "_stpu_minmax.json", _write_stpu, _read_stpu, asymmetric=False)
