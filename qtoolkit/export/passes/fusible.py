"""Rewrite ops from torch's exporters into forms for which runtimes have integer kernels."""

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir

from qtoolkit.export.files.graph import Constants, constant_input, maker_of, replace_node
from qtoolkit.export.files.kinds import axes_of, moved_from, uses_after
from qtoolkit.export.passes.repeated_pairs import is_on_codes, separate
from qtoolkit.integer.onnxruntime import global_pool_takes
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.rules import is_over_positions

END = np.iinfo(np.int64).max  # of a Slice: behind the last place of any dimension


def write_fusible_forms(model: onnx_ir.Model) -> None:
    """Write spatial means as GlobalAveragePool, linear layers with int32 biases as Gemm, PRelu with one slope as LeakyRelu.

    onnxruntime has integer kernels for these three, but not for ReduceMean, MatMul with Add, and PRelu. A mean whose scales the
    kernel does not take is a ReduceMean. Average pools with ceil_mode are rewritten for its integer kernel. Circular padding
    becomes a concat of slices: OpenVINO and TensorRT do not support it, and ONNX has it from opset 19 on.
    """
    for node in list(model.graph):
        if (write := REWRITTEN.get(node.op_type)) is not None:
            write(model, node)


def _write_global_pool(model: onnx_ir.Model, mean: onnx_ir.Node) -> None:
    source, output = mean.inputs[0], mean.outputs[0]
    shape = None if source is None else source.shape
    axes = axes_of(mean)
    if source is None or shape is None or len(shape) < 3 or axes is None or not is_on_codes(source):
        return
    if not is_over_positions(axes, len(shape)) or not _takes_scales(source, output):
        return
    pool = onnx_ir.node("GlobalAveragePool", [source], name=mean.name)
    pool.outputs[0].type = output.type
    pool.outputs[0].shape = onnx_ir.Shape([*shape[:2], *[1] * (len(shape) - 2)])
    new, last = [pool], pool.outputs[0]
    if not mean.attributes.get_int("keepdims", 1):
        new.append(onnx_ir.node("Squeeze", [last, Constants(model.graph).integers(axes, f"{mean.name}.axes")]))
        last = new[-1].outputs[0]
    replace_node(mean, new, last)


def _write_mean(model: onnx_ir.Model, pool: onnx_ir.Node) -> None:
    """Write a GlobalAveragePool whose scales the integer kernel does not take as ReduceMean: onnxruntime refuses to run it."""
    source, output = pool.inputs[0], pool.outputs[0]
    if source is None or source.shape is None or _takes_scales(source, output):
        return
    axes = range(2, len(source.shape))
    by_input = model.opset_imports[""] >= 18
    more = [Constants(model.graph).integers([*axes], f"{pool.name}.axes")] if by_input else []
    mean = onnx_ir.node("ReduceMean", [source, *more], {} if by_input else {"axes": [*axes]}, name=pool.name)
    mean.outputs[0].type, mean.outputs[0].shape = output.type, output.shape
    replace_node(pool, [mean], mean.outputs[0])


def _takes_scales(source: onnx_ir.Value, output: onnx_ir.Value) -> bool:
    """Return whether the global pool of onnxruntime takes the scales of the pairs before and after it, if there are both."""
    makers = [maker_of(each, "DequantizeLinear") for each in reached([source], moved_from)]
    before = [scale for maker in makers if maker is not None and (scale := constant_input(maker, 1)) is not None]
    quantizers = [user for user, _ in uses_after(output) if user.op_type == "QuantizeLinear"]
    after = [scale for quantize in quantizers if (scale := constant_input(quantize, 1)) is not None]
    return all(global_pool_takes(float(x.flat[0]), float(y.flat[0])) for x in before for y in after)


def _write_gemm(model: onnx_ir.Model, add: onnx_ir.Node) -> None:
    """Write x @ w.T + b, for x of more than two dimensions, as a Gemm of its rows.

    For a constant x, such as learned queries, with any bias: onnxruntime reshapes it too, but does not move the pair of a
    constant past its Reshape, and computes the product as MatMulNBits, which rounds x to another grid.
    """
    bias, product = sorted(add.inputs, key=lambda value: maker_of(value, "MatMul") is not None)
    matmul = maker_of(product, "MatMul")
    if product is None or bias is None or matmul is None:
        return
    if not _is_int32(bias) and _depends_on_inputs(product):
        return
    if len(product.uses()) > 1 or product.is_graph_output():
        return
    x, weight = matmul.inputs
    if x is None or x.shape is None or len(x.shape) < 3 or not is_on_codes(x):
        return
    transpose = maker_of(weight, "Transpose")
    if transpose is None or bias.shape is None or not all(isinstance(size, int) for size in x.shape[1:]):
        return
    (matrix,) = transpose.inputs
    if matrix is None or matrix.shape is None or len(matrix.shape) != 2 or [*bias.shape] != [matrix.shape[0]]:
        return  # what is added is no bias
    constants = Constants(model.graph)
    rows = onnx_ir.node("Reshape", [x, constants.integers([-1, x.shape[-1]], f"{add.name}.rows")])
    gemm = onnx_ir.node("Gemm", [rows.outputs[0], matrix, bias], {"transB": 1}, name=add.name)
    sizes = [-1, *x.shape[1:-1], bias.shape[-1]]
    back = onnx_ir.node("Reshape", [gemm.outputs[0], constants.integers(sizes, f"{add.name}.sizes")])
    replace_node(add, [rows, gemm, back], back.outputs[0])


def _write_leaky_relu(_: onnx_ir.Model, prelu: onnx_ir.Node) -> None:
    slope = constant_input(prelu, 1)
    if slope is not None and slope.size == 1:
        leaky = onnx_ir.node("LeakyRelu", prelu.inputs[:1], {"alpha": float(slope.item())}, name=prelu.name)
        replace_node(prelu, [leaky], leaky.outputs[0])


def _write_counted_pool(model: onnx_ir.Model, pool: onnx_ir.Node) -> None:
    """Write a pool with ceil_mode that counts its padding as a Pad and a pool that excludes padding.

    Both divide by the part of a window inside the padded input. onnxruntime's integer kernel with `count_include_pad` of 1
    divides by the whole window, also at the edges. Its default optimizations merge a Pad and a pool into such a pool, unless a
    pair is between them.
    """
    attributes, source = pool.attributes, pool.inputs[0]
    if source is None or not attributes.get_int("ceil_mode", 0) or not is_on_codes(source):
        return
    pads = list(attributes.get_ints("pads") or ()) if attributes.get_int("count_include_pad", 0) else []
    attributes["count_include_pad"] = onnx_ir.AttrInt64("count_include_pad", 0)
    if any(pads):
        attributes["pads"] = onnx_ir.AttrInt64s("pads", [0] * len(pads))
        half = len(pads) // 2
        sizes = Constants(model.graph).integers([0, 0, *pads[:half], 0, 0, *pads[half:]], f"{pool.name}.pads")
        padding = onnx_ir.node("Pad", [source, sizes], name=f"{pool.name}.padding")
        padding.outputs[0].type = source.type
        model.graph.insert_before(pool, padding)
        pool.replace_input_with(0, padding.outputs[0])
    pad = maker_of(pool.inputs[0], "Pad")
    if pad is not None:
        separate(model, pad, pool)


def _write_concat(model: onnx_ir.Model, pad: onnx_ir.Node) -> None:
    """Write circular padding as a concat of the end of a dimension, the whole dimension, and its start."""
    ends, whole = constant_input(pad, 1), pad.inputs[0]
    circular = pad.attributes.get_string("mode", "constant") == "wrap"
    if not circular or ends is None or whole is None or any(pad.inputs[3:]) or (ends < 0).any():
        return
    new: list[onnx_ir.Node] = []
    for axis, (before, behind) in enumerate(ends.reshape(2, -1).T.tolist()):
        name = f"{pad.name}.{axis}"
        last = [_slice(model, whole, axis, (-before, END), f"{name}.last")] if before else []
        first = [_slice(model, whole, axis, (0, behind), f"{name}.first")] if behind else []
        if last or first:
            joined = [*(cut.outputs[0] for cut in last), whole, *(cut.outputs[0] for cut in first)]
            new += [*last, *first, onnx_ir.node("Concat", joined, {"axis": axis}, name=name)]
            whole = new[-1].outputs[0]
    if new:
        replace_node(pad, new, whole)


def _slice(model: onnx_ir.Model, x: onnx_ir.Value, axis: int, places: tuple[int, int], name: str) -> onnx_ir.Node:
    constants, (start, end) = Constants(model.graph), places
    values = (start, "start"), (end, "end"), (axis, "axis")
    numbers = [constants.integers([value], f"{name}.{what}") for value, what in values]
    return onnx_ir.node("Slice", [x, *numbers], name=name)


def _is_int32(value: onnx_ir.Value) -> bool:
    dequantize = maker_of(value, "DequantizeLinear")
    codes = None if dequantize is None else dequantize.inputs[0]
    return codes is not None and codes.dtype == onnx_ir.DataType.INT32


def _depends_on_inputs(value: onnx_ir.Value) -> bool:
    """Return whether a value depends on input values of the file; input sizes may be constants and do not count."""

    def sources(value: onnx_ir.Value) -> list[onnx_ir.Value]:
        maker = value.producer()
        taken = () if maker is None or maker.op_type == "Shape" else maker.inputs
        return [source for source in taken if source is not None]

    return any(each.is_graph_input() for each in reached([value], sources))


REWRITTEN: Mapping[str, Callable[[onnx_ir.Model, onnx_ir.Node], None]] = {
    "ReduceMean": _write_global_pool,
    "GlobalAveragePool": _write_mean,
    "Add": _write_gemm,
    "PRelu": _write_leaky_relu,
    "AveragePool": _write_counted_pool,
    "Pad": _write_concat,
}
