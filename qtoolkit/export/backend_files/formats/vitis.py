"""The scales of Vitis AI's DPU, in the form that MQBench's converter to xmodel reads: JSON, a power of two for each tensor."""

from collections.abc import Sequence
from typing import Any

from qtoolkit.errors import within
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Format, as_json, from_json, number


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    return as_json({"vitis": {encoding.tensor: {"scale": encoding.scale[0]} for encoding in encodings}})


def _read(text: str, model: Any) -> list[Encoding]:
    weights = {tensor.name for tensor in model.graph.initializer}
    found = []
    for tensor, entry in from_json(text, "vitis").items():
        with within(tensor):
            scale = float32(number(entry, "scale"))
            found.append(Encoding(tensor, (scale,), (0,), -128, 127, tensor in weights))
    return found


SCALES = Format("Vitis's file of scales", "_clip_ranges.json", _write, _read, asymmetric=False, powers=True)
