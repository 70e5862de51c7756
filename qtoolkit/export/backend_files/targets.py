"""The files of each backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from qtoolkit.errors import some, warn
from qtoolkit.export.backend_files import formats_with_weights as with_weights
from qtoolkit.export.backend_files import formats_without_weights as without_weights
from qtoolkit.export.backend_files import placeholders
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.format import Format
from qtoolkit.export.backend_files.openvino import FakeQuantizeIR
from qtoolkit.export.backend_files.target import BackendFiles, Target, Write, check_same, with_ending
from qtoolkit.export.files.files import replacing_model
from qtoolkit.export.files.kinds import moved_inputs, ops_where
from qtoolkit.export.files.reading import open_model
from qtoolkit.export.passes.onnxruntime import CLIPS
from qtoolkit.files import write_atomically

# Ops that keep all values of their input.
_REARRANGING = ops_where(lambda kind: kind.rearranges)


@dataclass(frozen=True)
class FloatModel(Target):
    """A float ONNX file, and files with the grids of its tensors."""

    formats: tuple[Format, ...]  # the files of the grids, which all hold the same
    suffix: str = "_deploy_model.onnx"  # the end of the model's name
    # whether the target computes a layer and a ReLU as one op, and looks up the layer's output
    joins_relu: bool = False

    def write(self, export: Write, opset: int, path: Path) -> BackendFiles:
        """Check in memory that each file can be read again, then write them."""
        removed: list[Encoding] = []
        exported = export(lambda graph: removed.extend(placeholders.remove(graph)))
        found = spread(exported, removed, self.joins_relu)
        for encoding in found:
            for format in self.formats:
                format.check(encoding)
        model_path = with_ending(path, self.suffix)
        with replacing_model(exported, model_path, opset, "encodings") as files:
            model = onnx.load(str(files[0]), load_external_data=False)
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


def _checked_text(format: Format, encodings: Sequence[Encoding], model: onnx.ModelProto) -> str:
    """Return the text of a file, after a check that its reader finds the written encodings."""
    held = format.held(encodings, model)
    text = format.write(held, model)
    check_same(format.title, held, format.read(text, model))
    return text


def _warn_of_derived(format: Format, encodings: Sequence[Encoding], model: onnx_ir.Model) -> None:
    """Warn about weights for which the target derives other scales than the trained ones."""
    values = {name: value.const_value for name, value in model.graph.initializers.items()}
    other = [
        encoding.tensor
        for encoding in encodings
        if encoding.is_weight and (tensor := values.get(encoding.tensor)) is not None
        if not format.is_derived(encoding, np.asarray(tensor.numpy(), np.float32))
    ]
    if other:
        warn(
            f"encodings: {format.title} does not store weight scales: the target computes them from the values. For "
            f"{len(other)} weights they differ from the trained scales: {some(other)}. The Q/DQ file of export_onnx stores "
            "the trained scales.",
        )


def _warn_of_left_out(format: Format, encodings: Sequence[Encoding], held: Sequence[Encoding]) -> None:
    kept = {encoding.quantizer for encoding in held}
    left = [one.tensor for one in encodings if format.holds(one) and one.quantizer not in kept]
    if left:
        warn(
            f"encodings: {format.title} has no entry for {', '.join(left)}: the target accepts none for the ops that use "
            "these tensors.",
        )


# ---- grids of tensors before and after data movement ops: compilers look up a grid for each tensor


def spread(model: onnx_ir.Model, encodings: Iterable[Encoding], joins_relu: bool) -> list[Encoding]:
    """Return the encodings, and the encodings of tensors with the same values; with `joins_relu` also before a ReLU."""
    found = {encoding.tensor: encoding for encoding in encodings}
    nodes = [node for node in model.graph if not node.domain]
    for node in nodes:
        sources = node.inputs[:1] if node.op_type == "Gather" else moved_inputs(node)
        known = [None if source is None else found.get(str(source.name)) for source in sources]
        first = known[0] if known else None
        if first is not None and all(one is not None and one.has_grid_of(first) for one in known):
            _add(found, first, (str(output.name) for output in node.outputs))
    for node in reversed(nodes):
        goes_back = node.op_type in _REARRANGING or (joins_relu and node.op_type in CLIPS)
        source = node.inputs[0] if goes_back else None
        behind = found.get(str(node.outputs[0].name))
        if source is not None and behind is not None and source.producer() is not None and len(source.uses()) == 1:
            _add(found, behind, () if source.is_graph_output() else (str(source.name),))
    return list(found.values())


def _add(found: dict[str, Encoding], encoding: Encoding, tensors: Iterable[str]) -> None:
    if encoding.axis is None and not encoding.is_weight:
        for tensor in tensors:
            found.setdefault(tensor, replace(encoding, tensor=tensor))


_TENSORRT = FloatModel((without_weights.TENSORRT_CACHE, without_weights.TENSORRT_RANGES))
_QUALCOMM = FloatModel((with_weights.QUALCOMM,))
_PPL = FloatModel((with_weights.PPL,))

TARGETS: Mapping[str, Target] = {
    "tensorrt10": _TENSORRT,
    "tensorrt8": _TENSORRT,
    "openvino": FakeQuantizeIR(),
    "snpe": _QUALCOMM,
    "qnn": _QUALCOMM,
    "ppl": _PPL,
    "ppl-w8a16": _PPL,
    "tengine": FloatModel((without_weights.TENGINE,), "_for_tengine.onnx", joins_relu=True),
    "nnie": FloatModel((without_weights.NNIE,)),
    "stpu": FloatModel((with_weights.STPU,), "_for_stpu.onnx", joins_relu=True),
    "vitis": FloatModel((with_weights.VITIS,)),
}
