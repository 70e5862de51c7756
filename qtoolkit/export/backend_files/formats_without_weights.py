"""File formats for activations only; the targets derive the grids of weights from the values: TensorRT, Tengine and NNIE."""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.format import Format, as_json, from_json, number, read_each
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    import onnx


def _magnitudes(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(np.abs(values).max(axes))


# ---- TensorRT's files for implicit quantization: its calibration cache, and the ranges that MQBench's users set themselves.
# The cache is the text that IInt8Calibrator.write_calibration_cache gives: a line with the version and the calibrator, then
# `tensor: scale`, the scale as eight hexadecimal digits of a float32. TensorRT computes the scales of weights from their
# values: the largest magnitude of an output channel, divided by 127. (NVIDIA's documentation, "Working with Quantized Types".)

HEADER = "TRT-100000-EntropyCalibration2"
_LARGEST = 127  # the code of the highest value of a dynamic range


def _write_cache(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    lines = (f"{encoding.tensor}: {struct.pack('>f', encoding.scale[0]).hex()}" for encoding in encodings)
    return "\n".join((HEADER, *lines)) + "\n"


def _read_cache(text: str, model: "onnx.ModelProto") -> list[Encoding]:
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


def _write_ranges(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    ranges = {encoding.tensor: encoding.scale[0] * _LARGEST for encoding in encodings}
    return as_json({"tensorrt": {"blob_range": ranges}})


def _read_ranges(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    ranges = from_json(text, "tensorrt", "blob_range")
    return [_signed(tensor, number(end) / _LARGEST) for tensor, end in ranges.items()]


def _signed(tensor: str, scale: float) -> Encoding:
    return Encoding(tensor, (float32(scale),), (0,), -128, 127)


def _signed_steps(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(_magnitudes(values, axes) / _LARGEST)


TENSORRT_CACHE, TENSORRT_RANGES = (
    Format(title, suffix, write, read, asymmetric=False, derive=_signed_steps)
    for title, suffix, write, read in (
        ("TensorRT's calibration cache", "_calibration.cache", _write_cache, _read_cache),
        ("the file of TensorRT's dynamic ranges", "_clip_ranges.json", _write_ranges, _read_ranges),
    )
)

# ---- Tengine's table of activations: a line `tensor scale zero_point` for each, uint8.
# Its quantization tool computes the grids of weights from their values, between the lowest and the highest.

_STEPS = 255


def _write_table(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    lines = (f"{one.tensor} {one.scale[0]!r} {one.unsigned_zero_point[0]}" for one in encodings)
    return "".join(line + "\n" for line in lines)


def _read_table(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    found = []
    for line in text.splitlines():
        try:
            tensor, scale, zero_point = line.rsplit(" ", 2)
            found.append(Encoding(tensor, (float32(float(scale)),), (int(zero_point),), 0, _STEPS))
        except ValueError as error:
            raise ValueError(
                f"a line must be a tensor, a scale and a zero point, got {line!r}: {str(error).rstrip('.')}."
            ) from None
    return found


def _unsigned_steps(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray((np.maximum(values, 0).max(axes) - np.minimum(values, 0).min(axes)) / _STEPS)


TENGINE = Format(
    "Tengine's table of scales",
    "_for_tengine.scale",
    _write_table,
    _read_table,
    symmetric=False,
    derive=_unsigned_steps,
)

# ---- NNIE's parameters of its logarithmic grids: JSON with the largest magnitudes of the inputs of each layer.
# HiSilicon's mapper computes the largest magnitudes of weights from their values. It takes no parameters for some ops and for
# grouped convolutions, whose inputs have none here, as in MQBench's files.

_WITHOUT = ("Clip", "Flatten", "GlobalAveragePool", "Identity", "Mul", "PRelu", "Relu", "Reshape", "Sigmoid", "Softmax")


def _write_nnie(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> str:
    largest = {encoding.tensor: encoding.scale[0] for encoding in encodings}
    layers = {
        node: [largest[tensor] for tensor in tensors]
        for node, tensors in _inputs(model)
        if all(tensor in largest for tensor in tensors)
    }
    return as_json({"nnie": {"gfpq_param_dict": layers}})


def _placed(encodings: Sequence[Encoding], model: "onnx.ModelProto") -> set[str]:
    known = {encoding.tensor for encoding in encodings}
    return {tensor for _, tensors in _inputs(model) if known.issuperset(tensors) for tensor in tensors}


def _inputs(model: "onnx.ModelProto") -> Iterator[tuple[str, list[str]]]:
    """Yield each node with parameters, and its inputs that are not constant."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        grouped = any(attribute.name == "group" and attribute.i != 1 for attribute in node.attribute)
        tensors = [tensor for tensor in node.input if tensor and tensor not in constants]
        if tensors and not grouped and node.op_type not in _WITHOUT:
            yield node.name, tensors


def _read_nnie(text: str, model: "onnx.ModelProto") -> list[Encoding]:
    inputs = dict(_inputs(model))

    def read(node: str, values: object) -> list[Encoding]:
        tensors = inputs.get(node)
        if tensors is None or not isinstance(values, list) or len(values) != len(tensors):
            raise ValueError(f"it must be a node of the model, with a number for each of its inputs, got {values!r}.")
        pairs = zip(tensors, values, strict=True)
        return [Encoding(t, (float32(number(value)),), (0,), -127, 127, format="nnie") for t, value in pairs]

    return read_each(from_json(text, "nnie", "gfpq_param_dict"), read)


NNIE = Format(
    "NNIE's file of parameters",
    "_gfpq_param_dict.json",
    _write_nnie,
    _read_nnie,
    logarithmic=True,
    derive=_magnitudes,
    placed=_placed,
)
