"""STPU's file of ranges: JSON with those of tensors, of weights by their node, and the steps of biases.

Codes lie in [-127, 127]. MQBench's files also have exponents named `emin`, for which there is no description.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from qtoolkit.errors import within
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Format, as_json, from_json, number
from qtoolkit.export.files.kinds import WEIGHTED

_LARGEST = 127


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    by_tensor = {encoding.tensor: encoding for encoding in encodings}
    ranges: dict[str, Any] = {one.tensor: _range(one) for one in encodings if not one.is_weight}
    for key, node in _layers(model):
        weight, source = by_tensor.get(node.input[1]), by_tensor.get(node.input[0])
        if weight is not None:
            ranges[key] = _range(weight)
        if weight is not None and source is not None and len(node.input) > 2:
            ranges[f"{node.name}_bias"] = {"alpha": weight.scale[0] * source.scale[0], "zero_point": 0}
    return as_json(ranges)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key of each layer's weight, and its node."""
    return ((f"{node.name}_weights", node) for node in model.graph.node if node.op_type in WEIGHTED)


def _range(encoding: Encoding) -> dict[str, float]:
    return {"min": -_LARGEST * encoding.scale[0], "max": _LARGEST * encoding.scale[0]}


def _read(text: str, model: Any) -> list[Encoding]:
    weights = {key: node.input[1] for key, node in _layers(model)}
    found: dict[str, Encoding] = {}
    for key, entry in from_json(text).items():
        with within(key):
            if not isinstance(entry, dict) or "alpha" not in entry:
                scale, tensor = float32(number(entry, "max") / _LARGEST), weights.get(key, key)
                found[tensor] = Encoding(tensor, (scale,), (0,), -_LARGEST, _LARGEST, key in weights)
    return list(found.values())


RANGES = Format("STPU's file of ranges", "_stpu_minmax.json", _write, _read, asymmetric=False)
