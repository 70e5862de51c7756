"""Read the encodings from the quantizer placeholders of an exported graph, and remove the placeholders."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
import onnxscript.optimizer

from qtoolkit.errors import present
from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.exporters.translation import DOMAIN, QUANTIZER, placeholders_in, rounding_of
from qtoolkit.export.files.graph import constant_input
from qtoolkit.export.pairs.storage import SUMS
from qtoolkit.runtimes.execution import Array


def encoding_of(node: onnx_ir.Node) -> Encoding | None:
    """Return the encoding of the tensor that a placeholder quantizes; None for a bias, which uses the accumulator's grid.

    Raises ValueError: its grid is computed from the input, has scales per block, or is a small float format.
    """
    how = rounding_of(node)
    if how.code_range == SUMS:
        return None
    name, tensor = node.attributes.get_string(QUANTIZER) or "", present(node.inputs[0], f"the input of {node.name!r}")
    scale, zero_point = (constant_input(node, index) for index in (1, 2))
    if scale is None or how.format not in ("int", "nnie") or how.block_size > 0:
        raise ValueError(
            f"encodings: {name or tensor.name!r} has block-wise or dynamic scales, or a small float format, which backend "
            "files cannot hold; use export_onnx, which supports the ones that exist in ONNX."
        )
    code_range = (-127, 127) if how.format == "nnie" else how.code_range
    scales = tuple(float(one) for one in scale.reshape(-1))
    zeros = (0,) * len(scales) if zero_point is None else tuple(int(one) for one in zero_point.reshape(-1))
    axis = how.axis if len(scales) > 1 else None
    constant = onnx_ir.convenience.get_const_tensor(tensor) is not None and not tensor.is_graph_input()
    return Encoding(
        tensor.name or "", scales, zeros, *code_range, constant, axis, how.group, how.format, quantizer=name
    )


def remove(model: onnx_ir.Model) -> list[Encoding]:
    """Remove the placeholders; return the encodings with the names of the tensors in the new graph.

    Weights are clipped to the ranges of their grids, as the target would. Values up to half a step outside an affine range are
    kept, so that a target that derives the grid from the values finds the same grid. Raises ValueError: a grid has no encoding,
    or a tensor has two.
    """
    found: dict[onnx_ir.Value, Encoding] = {}
    for node in placeholders_in(model):
        encoding, source = encoding_of(node), present(node.inputs[0], f"the input of {node.name!r}")
        source = _take_out(node, source)
        if encoding is not None:
            _check_only(found.get(source), encoding)
            found.setdefault(source, encoding)
    for source, encoding in found.items():
        if source.is_initializer():
            clip(source, encoding, slack=0.0 if encoding.is_symmetric else 0.5)
    model.opset_imports.pop(DOMAIN, None)
    onnxscript.optimizer.remove_unused_nodes(model)
    return [replace(encoding, tensor=source.name or "") for source, encoding in found.items()]


def _take_out(node: onnx_ir.Node, source: onnx_ir.Value) -> onnx_ir.Value:
    """Replace the output of a placeholder by its input in all users; return the tensor that the encoding then belongs to."""
    graph, output = present(node.graph, f"the graph of {node.name!r}"), node.outputs[0]
    for user, index in tuple(output.uses()):
        user.replace_input_with(index, source)
    if output.is_graph_output():
        given = output.name
        graph.remove(node)
        if source.producer() is None or source.is_graph_output():  # an input, a constant or another output
            identity = onnx_ir.node("Identity", [source], outputs=[onnx_ir.Value(name=given)])
            identity.outputs[0].shape, identity.outputs[0].type = output.shape, output.type
            graph.append(identity)
            new = identity.outputs[0]
        else:
            source.name, new = given, source
        for index, value in enumerate(graph.outputs):
            if value is output:
                graph.outputs[index] = new
        return source
    graph.remove(node, safe=True)
    return source


def _check_only(known: Encoding | None, new: Encoding) -> None:
    if known is not None and not known.has_grid_of(new):
        raise ValueError(
            f"encodings: tensor {new.tensor!r} is quantized by {known.quantizer!r} and again by {new.quantizer!r} on another "
            f"grid, and a backend file holds one grid for a tensor; give both one config by a QConfigMapping, or prepare for "
            f"a backend with dataclasses.replace(backend, shared_concat=False)."
        )


def clip(source: onnx_ir.Value, encoding: Encoding, slack: float) -> None:
    """Clip a constant to the range of its grid if it lies more than `slack` steps outside."""
    tensor = present(onnx_ir.convenience.get_const_tensor(source), f"the constant {encoding.tensor!r}")
    array = tensor.numpy()
    low, high, step = (
        along_axis(np.array(n), encoding, array.shape) for n in (encoding.low, encoding.high, encoding.scale)
    )
    above = np.where(array < low - slack * step, low, array)
    clipped = np.where(array > high + slack * step, high, above).astype(array.dtype)
    source.const_value = onnx_ir.Tensor(clipped, tensor.dtype, name=source.name)


def along_axis(values: Array, encoding: Encoding, shape: Sequence[Any]) -> Array:
    """Return per-tensor or per-channel values in a shape that broadcasts to a tensor of this shape."""
    sizes = [1] * len(shape)
    if encoding.axis is None:
        return values.reshape(sizes)
    if encoding.group > 1:  # of a weight (in, out / groups, k...)
        values = values.reshape(encoding.group, shape[1]).repeat(shape[0] // encoding.group, 0)
        return values.reshape(shape[0], shape[1], *sizes[2:])
    sizes[encoding.axis] = -1
    return values.reshape(sizes)
