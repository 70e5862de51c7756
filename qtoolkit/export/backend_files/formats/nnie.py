"""NNIE's parameters of its logarithmic grids: JSON with the largest magnitudes of the inputs of each layer.

HiSilicon's mapper computes the largest magnitudes of weights from their values. It takes no parameters for some ops and for
grouped convolutions, whose inputs have none here, as in MQBench's files.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qtoolkit.errors import within
from qtoolkit.export.backend_files.encoding import Encoding, float32
from qtoolkit.export.backend_files.formats.base import Array, Format, as_json, from_json, number

_WITHOUT = ("Clip", "Flatten", "GlobalAveragePool", "Identity", "Mul", "PRelu", "Relu", "Reshape", "Sigmoid", "Softmax")


def _write(encodings: Sequence[Encoding], model: Any) -> str:
    largest = {encoding.tensor: encoding.scale[0] for encoding in encodings}
    layers = {
        node: [largest[tensor] for tensor in tensors]
        for node, tensors in _inputs(model)
        if all(tensor in largest for tensor in tensors)
    }
    return as_json({"nnie": {"gfpq_param_dict": layers}})


def _placed(encodings: Sequence[Encoding], model: Any) -> set[str]:
    known = {encoding.tensor for encoding in encodings}
    return {tensor for _, tensors in _inputs(model) if known.issuperset(tensors) for tensor in tensors}


def _inputs(model: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each node that has parameters, and its inputs that are not constants."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        grouped = any(attribute.name == "group" and attribute.i != 1 for attribute in node.attribute)
        tensors = [tensor for tensor in node.input if tensor and tensor not in constants]
        if tensors and not grouped and node.op_type not in _WITHOUT:
            yield node.name, tensors


def _read(text: str, model: Any) -> list[Encoding]:
    inputs, found = dict(_inputs(model)), {}
    for node, values in from_json(text, "nnie", "gfpq_param_dict").items():
        with within(node):
            tensors = inputs.get(node)
            if tensors is None or not isinstance(values, list) or len(values) != len(tensors):
                raise ValueError(
                    f"it must be a node of the model, with a number for each of its inputs, got {values!r}."
                )
            for tensor, value in zip(tensors, values, strict=True):
                found[tensor] = Encoding(tensor, (float32(number(value)),), (0,), -127, 127, format="nnie")
    return list(found.values())


def _derived(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(np.abs(values).max(axes))


PARAMETERS = Format(
    "NNIE's file of parameters",
    "_gfpq_param_dict.json",
    _write,
    _read,
    logarithmic=True,
    derive=_derived,
    placed=_placed,
)
