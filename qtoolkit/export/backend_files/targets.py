"""The files of each backend."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtoolkit.errors import some
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.formats import nnie, ppl, qualcomm, stpu, tengine, tensorrt, vitis
from qtoolkit.export.backend_files.formats.base import Format
from qtoolkit.export.backend_files.moves import spread
from qtoolkit.export.backend_files.openvino import FakeQuantizeIR
from qtoolkit.export.backend_files.target import BackendFiles, Target, Write, check_same, with_ending
from qtoolkit.export.files.files import replacing_model
from qtoolkit.export.files.reading import open_model
from qtoolkit.files import write_atomically

if TYPE_CHECKING:
    import onnx
    import onnx_ir


@dataclass(frozen=True)
class FloatModel(Target):
    """An ONNX file in float, and files with the grids of its tensors.

    Attributes:
        formats: The files of the grids, which all hold the same.
        suffix: The end of the model's name.
        joins_relu: Whether the target computes a layer and a ReLU as one op, and looks up the layer's output.
    """

    formats: tuple[Format, ...]
    suffix: str = "_deploy_model.onnx"
    joins_relu: bool = False

    def write(self, export: Write, opset: int, path: Path) -> BackendFiles:
        """Write the files, after each has been read again in memory."""
        from qtoolkit.export.backend_files import placeholders

        removed: list[Encoding] = []
        exported = export(lambda graph: removed.extend(placeholders.remove(graph)))
        found = spread(exported, removed, self.joins_relu)
        for encoding in found:
            for format in self.formats:
                format.check(encoding)
        model_path = with_ending(path, self.suffix)
        with replacing_model(exported, model_path, opset, "encodings") as files:
            model = _graph_of(files[0])
            _warn_of_derived(self.formats[0], found, exported)
            texts = {with_ending(path, f.suffix): _checked_text(f, found, model) for f in self.formats}
        for name, text in texts.items():
            write_atomically(text.encode(), name)
        held = self.formats[0].held(found, model)
        _warn_of_left_out(self.formats[0], found, held)
        return BackendFiles(model_path, tuple(texts), tuple(held))

    def read(self, path: Path) -> list[Encoding]:
        """Read the first of the files."""
        text = _text_of(with_ending(path, self.formats[0].suffix))
        return self.formats[0].read(text, open_model(with_ending(path, self.suffix)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"read_encodings: {str(path)!r} must be text in UTF-8: {error.reason}.") from None


def _graph_of(path: str | os.PathLike[str]) -> "onnx.ModelProto":
    import onnx

    return onnx.load(str(path), load_external_data=False)


def _checked_text(format: Format, encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    """Return the text of a file whose reader finds what was written."""
    held = format.held(encodings, model)
    text = format.write(held, model)
    check_same(format.title, held, format.read(text, model))
    return text


def _warn_of_derived(format: Format, encodings: Sequence[Encoding], model: "onnx_ir.Model") -> None:
    """Warn of weights for which a target that computes their scales itself finds others."""
    import numpy as np

    values: dict[str, Any] = {name: value.const_value for name, value in model.graph.initializers.items()}
    other = [
        encoding.tensor
        for encoding in encodings
        if encoding.is_weight and values.get(encoding.tensor) is not None
        if not format.is_derived(encoding, np.asarray(values[encoding.tensor].numpy(), np.float32))
    ]
    if other:
        warnings.warn(
            f"encodings: {format.title} has no scales of weights; the target computes them from the values, and finds others "
            f"than the trained ones for {len(other)} weights: {some(other)}. The Q/DQ file of export_onnx "
            f"holds the trained ones.",
            stacklevel=4,
        )


def _warn_of_left_out(format: Format, encodings: Sequence[Encoding], held: Sequence[Encoding]) -> None:
    kept = {encoding.quantizer for encoding in held}
    left = [one.tensor for one in encodings if format.holds(one) and one.quantizer not in kept]
    if left:
        warnings.warn(
            f"encodings: {format.title} has no entry for {', '.join(left)}: the target takes none for the ops that read them.",
            stacklevel=4,
        )


_TENSORRT = FloatModel((tensorrt.CACHE, tensorrt.RANGES))
_QUALCOMM = FloatModel((qualcomm.ENCODINGS,))
_PPL = FloatModel((ppl.RANGES,))

TARGETS: Mapping[str, Target] = {
    "tensorrt": _TENSORRT,
    "tensorrt8": _TENSORRT,
    "tensorrt-nlp": _TENSORRT,
    "openvino": FakeQuantizeIR(),
    "snpe": _QUALCOMM,
    "qnn": _QUALCOMM,
    "ppl": _PPL,
    "ppl-w8a16": _PPL,
    "tengine": FloatModel((tengine.TABLE,), "_for_tengine.onnx", joins_relu=True),
    "nnie": FloatModel((nnie.PARAMETERS,)),
    "stpu": FloatModel((stpu.RANGES,), "_for_stpu.onnx", joins_relu=True),
    "vitis": FloatModel((vitis.SCALES,)),
}
