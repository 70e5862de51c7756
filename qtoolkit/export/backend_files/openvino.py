"""OpenVINO's own format: an IR (.xml and .bin) with FakeQuantize operations.

A FakeQuantize has a range and a number of levels. The CPU plugin computes in integers with 256 or 255 levels. A weight of fewer
bits is clipped to its own range, and its operation has 256 levels with the same step.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir
import onnxscript.optimizer

from qtoolkit.errors import present
from qtoolkit.export.backend_files import placeholders
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.target import BackendFiles, Target, Write, check_same, with_ending
from qtoolkit.export.exporters.translation import DOMAIN, placeholders_in
from qtoolkit.export.files.files import save
from qtoolkit.export.files.graph import Constants, replace_node
from qtoolkit.export.verification.runtimes.openvino_cpu import core
from qtoolkit.extras import needed
from qtoolkit.files import write_atomically

if TYPE_CHECKING:
    import openvino

_DOMAIN, _OP = "org.openvinotoolkit", "FakeQuantize"
_LEVELS = 256


class FakeQuantizeIR(Target):
    """An IR with FakeQuantize operations that hold the grids."""

    def write(self, export: Write, opset: int, path: Path) -> BackendFiles:
        """Check that both files can be read again, then write them."""
        openvino = needed("openvino", "encodings", "openvino")
        found: list[Encoding] = []
        exported = export(lambda graph: found.extend(_write_operations(graph)))
        xml, weights = (with_ending(path, ending) for ending in (".xml", ".bin"))
        with tempfile.TemporaryDirectory() as folder:
            file, _ = save(exported, Path(folder), "model.onnx.data")
            new = Path(folder) / "ir.xml"
            openvino.serialize(core().read_model(file), new)
            check_same("OpenVINO's IR", found, _read_operations(new))
            write_atomically(new.with_suffix(".bin"), weights)
            write_atomically(new, xml)
        return BackendFiles(xml, (weights,), tuple(found))

    def read(self, path: Path) -> list[Encoding]:
        return _read_operations(with_ending(path, ".xml"))


def _write_operations(model: onnx_ir.Model) -> list[Encoding]:
    """Replace the placeholders by FakeQuantize operations; return their grids, one for each tensor."""
    found: dict[str, Encoding] = {}
    for node in placeholders_in(model):
        encoding, source = placeholders.encoding_of(node), present(node.inputs[0], f"the input of {node.name!r}")
        if encoding is None:  # of a bias
            onnx_ir.convenience.replace_all_uses_with(node.outputs[0], source)
            continue
        _check(encoding)
        if encoding.is_weight and source.is_initializer():
            placeholders.clip(source, encoding, slack=0.0)
            encoding = _widened(encoding)
        _write_operation(node, source, encoding)
        found[encoding.tensor] = _written(encoding, tuple(source.shape or ()))
    onnxscript.optimizer.remove_unused_nodes(model)
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports[_DOMAIN] = 1
    return list(found.values())


def _check(encoding: Encoding) -> None:
    if encoding.format != "int":
        raise ValueError(
            f"encodings: OpenVINO's IR cannot hold the grid of {encoding.tensor!r} (quantizer {encoding.quantizer!r}): it "
            f"supports only integer grids, got format={encoding.format!r}; prepare with format='int'."
        )


def _widened(weight: Encoding) -> Encoding:
    """Return an 8-bit grid with the step of a weight's grid."""
    if weight.qmax - weight.qmin + 1 >= _LEVELS - 1:
        return weight
    return replace(weight, qmin=-128, qmax=127) if weight.qmin < 0 else replace(weight, qmax=255)


def _written(encoding: Encoding, shape: Sequence[object]) -> Encoding:
    """Return an encoding with one scale per element of the range's bounds; the scales of a group are repeated."""
    if encoding.group == 1 or encoding.axis is None:
        return encoding
    scale, zero_point = (
        placeholders.along_axis(np.array(n), encoding, shape).reshape(-1) for n in (encoding.scale, encoding.zero_point)
    )
    return replace(encoding, scale=tuple(scale.tolist()), zero_point=tuple(zero_point.tolist()), axis=0, group=1)


def _write_operation(node: onnx_ir.Node, source: onnx_ir.Value, encoding: Encoding) -> None:
    graph = present(node.graph, f"the graph of {node.name!r}")
    bounds = []
    for role, values in (("low", encoding.low), ("high", encoding.high)):
        name = f"{node.outputs[0].name}.{role}"
        array = placeholders.along_axis(np.array(values, np.float32), encoding, tuple(source.shape or ()))
        bounds.append(Constants(graph).add(array, onnx_ir.DataType.FLOAT, name))
    levels = {"levels": encoding.qmax - encoding.qmin + 1}
    new = onnx_ir.node(_OP, [source, *bounds, *bounds], levels, domain=_DOMAIN, name=f"{node.outputs[0].name}.{_OP}")
    replace_node(node, [new], new.outputs[0])


def _read_operations(path: Path) -> list[Encoding]:
    needed("openvino", "encodings", "openvino")
    try:
        model = core().read_model(path)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[-1]
        raise ValueError(f"read_encodings: OpenVINO cannot read {str(path)!r}: {first}.") from None
    found = (_encoding(operation) for operation in model.get_ops() if operation.get_type_name() == _OP)
    return list({encoding.tensor: encoding for encoding in found}.values())


def _encoding(operation: "openvino.Node") -> Encoding:
    sources = [value.get_source_output() for value in operation.inputs()]
    low, high = (np.asarray(source.get_node().get_data(), np.float64).reshape(-1) for source in sources[1:3])
    steps = operation.get_attributes()["levels"] - 1
    scale = tuple(float32(step) for step in (high - low) / steps)
    codes = tuple(round(-end / step) for end, step in zip(low, scale, strict=True))  # of zero, counted from the lowest
    middle = (steps + 1) // 2  # of a grid of signed codes, the lowest of which a narrow one leaves out
    qmin = -middle if set(codes) == {middle} and steps % 2 else -steps // 2 if steps % 2 == 0 else 0
    zero_points = tuple(code + qmin for code in codes)
    is_weight = sources[0].get_node().get_type_name() == "Constant"
    (tensor,) = sources[0].get_names() or {""}
    return Encoding(tensor, scale, zero_points, qmin, qmin + steps, is_weight)
