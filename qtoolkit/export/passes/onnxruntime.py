"""Rewrites that protect a file from errors in onnxruntime's default optimizations.

They concern clips, float weights, softmaxes, products with scales that its kernel does not support, and small floats.
"""

import numpy as np
import onnx_ir

from qtoolkit.errors import present
from qtoolkit.export.files.graph import Constants, constant_input, has_one_scale, input_at, maker_of
from qtoolkit.export.files.kinds import WEIGHTED, bounds_of, ops_where, uses_after
from qtoolkit.export.files.ops import ConstantWeight, layer_of
from qtoolkit.export.passes.repeated_pairs import is_on_codes
from qtoolkit.runtimes.execution import Array

CLIPS = ops_where(lambda kind: kind.clips)
SMALL_FLOATS = (onnx_ir.DataType.FLOAT8E4M3FN, onnx_ir.DataType.FLOAT8E5M2, onnx_ir.DataType.FLOAT4E2M1)
PRODUCTS = WEIGHTED - {"ConvTranspose"}  # for which onnxruntime has integer kernels
LAYERS = ops_where(lambda kind: kind.layer)
SIGNIFICAND = 24  # bits of a float32
LEAST_EXPONENT = -126 + SIGNIFICAND  # so that steps are normal numbers


def drop_saturated_clips(model: onnx_ir.Model) -> None:
    """Remove each Clip whose bounds are at or beyond the range of the QuantizeLinear after it.

    No quantized value changes. onnxruntime's default optimizations need it: if the range ends at most half a step beyond a
    bound (6 of ReLU6), they fuse the convolution before the Clip but keep the Clip, and the model does not load ("two nodes
    with same node name"). A Clip of quantized values stays: onnxruntime would merge the two pairs around it, and round once
    instead of twice.
    """
    for node in list(model.graph):
        if node.op_type == "Clip" and _is_saturated(node):
            source, output = node.inputs[0], node.outputs[0]
            if source is None or is_on_codes(source):
                continue
            onnx_ir.convenience.replace_all_uses_with(output, source)
            model.graph.remove(node, safe=True)


def _is_saturated(clip: onnx_ir.Node) -> bool:
    output = clip.outputs[0]
    users = [user for user, _ in output.uses()]
    if output.is_graph_output() or len(users) != 1 or users[0].op_type != "QuantizeLinear":
        return False
    scale, zero_point = (constant_input(users[0], index) for index in (1, 2))
    bounds = bounds_of(clip)
    if bounds is None or scale is None or zero_point is None or scale.size != 1 or zero_point.dtype.kind not in "iu":
        return False
    codes, takers = np.iinfo(zero_point.dtype), [user for user, _ in users[0].outputs[0].uses()]
    clipped = bounds_of(takers[0]) if len(takers) == 1 else None  # codes of fewer bits than their type has
    lowest, highest = clipped or (codes.min, codes.max)
    low, high = (np.rint(np.float32(bound) / scale.astype(np.float32)) + zero_point for bound in bounds)
    return bool((low <= lowest).all() and (high >= highest).all())


def quantizer_behind(value: onnx_ir.Value) -> tuple[onnx_ir.Node | None, list[onnx_ir.Value]]:
    """Return the QuantizeLinear that is the only user of a value, also after activations, and the outputs of these."""
    joined: list[onnx_ir.Value] = []
    while not value.is_graph_output() and len(value.uses()) == 1:
        ((user, index),) = value.uses()
        if user.op_type == "QuantizeLinear":
            return user, joined
        if user.op_type not in CLIPS or index != 0:
            break
        value = user.outputs[0]
        joined.append(value)
    return None, joined


def keep_float_weights(model: onnx_ir.Model) -> None:
    """Write the biases of layers with a float weight between Q/DQ pairs as int32 with the same values.

    onnxruntime's default optimizations round such a weight to int8 with one scale, unless the bias comes from a
    DequantizeLinear (core/optimizer/qdq_transformer/weight_bias_quantization.cc). A layer without a bias gets a zero bias.
    """
    for node in list(model.graph):
        source = maker_of(node.inputs[0], "DequantizeLinear") if node.op_type in LAYERS else None
        weight = None if source is None else constant_input(node, 1)
        if source is None or weight is None or weight.dtype != np.float32:
            continue
        if not has_one_scale(source) or quantizer_behind(node.outputs[0])[0] is None:
            continue
        zeros = np.zeros(layer_of(node, weight.shape).outputs, np.float32)
        bias = zeros if input_at(node, 2) is None else constant_input(node, 2)
        if bias is not None and bias.ndim == 1 and np.isfinite(bias).all():
            _write(model, node, bias)


def exact_codes(bias: Array) -> tuple[Array, Array]:
    """Return int32 values and power-of-two float32 steps with these float32 values as products; to 2^-127 near zero.

    Example:
        >>> exact_codes(np.array([0.75, -3.0], np.float32))
        (array([ 12582912, -12582912], dtype=int32), array([5.9604645e-08, 2.3841858e-07], dtype=float32))
    """
    exponents = np.maximum(np.frexp(bias)[1], LEAST_EXPONENT) - SIGNIFICAND
    codes = np.rint(np.ldexp(bias.astype(np.float64), -exponents)).astype(np.int32)
    return codes, np.ldexp(np.float32(1), exponents)


def _write(model: onnx_ir.Model, node: onnx_ir.Node, bias: Array) -> None:
    codes, steps = exact_codes(bias)
    constants, name = Constants(model.graph), f"{node.name}.bias"
    inputs = [
        constants.add(codes, onnx_ir.DataType.INT32, f"{name}.codes"),
        constants.add(steps, onnx_ir.DataType.FLOAT, f"{name}.scale"),
    ]
    dequantize = onnx_ir.node("DequantizeLinear", inputs, {"axis": 0}, name=f"{name}/dequantize")
    (value,) = dequantize.outputs
    value.dtype, value.shape = onnx_ir.DataType.FLOAT, onnx_ir.Shape(bias.shape)
    model.graph.insert_before(node, dequantize)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, value)


def keep_float_softmax(model: onnx_ir.Model) -> None:
    """Write a Max of one tensor (an identity op) before each Softmax between quantized values.

    Otherwise onnxruntime uses QLinearSoftmax, which rounds 1 / scale down to an integer
    (contrib_ops/cpu/quantization/qlinear_softmax.cc): with few bits the error is a third, with eight bits one step.
    """
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Softmax" else None
        if source is not None and is_on_codes(source) and _is_quantized(node.outputs[0]):
            _take_maximum(model, node, 0, f"{node.name}.input")


def keep_float_products(model: onnx_ir.Model) -> None:
    """Write a Max of one tensor (an identity op) after each weight with scales that onnxruntime's kernels do not support.

    They support per-output-channel scales. Scales along another axis are mistaken for these if the number is the same; with
    another number, and for a batch of matrices, the kernel raises an error at run time
    (cpu/quantization/matmul_integer_base.h).
    """
    for node in list(model.graph):
        if node.op_type in PRODUCTS and _has_other_scales(node):
            _take_maximum(model, node, 1, f"{node.name}.weight")


def _has_other_scales(node: onnx_ir.Node) -> bool:
    value = node.inputs[1]
    if value is None or not is_on_codes(value):
        return False
    weight = ConstantWeight.of(value)
    if weight.axis is None:
        return False
    is_batch = node.op_type == "MatMul" and len(weight.shape) > 2
    return is_batch or weight.axis != layer_of(node, weight.shape).output_axis


def keep_small_floats(model: onnx_ir.Model) -> None:
    """Write a Max of one tensor (an identity op) before and after each pair of a small float format.

    onnxruntime replaces ops between pairs by integer kernels, which do not support small floats, so the model does not load. It
    also drops a ReLU before a pair with zero point 0, as if the pair had no negative numbers.
    """
    for node in list(model.graph):
        zero_point = input_at(node, 2) if node.op_type in ("QuantizeLinear", "DequantizeLinear") else None
        if zero_point is None or zero_point.dtype not in SMALL_FLOATS:
            continue
        ends = [(node, 0)] if node.op_type == "QuantizeLinear" else tuple(node.outputs[0].uses())
        for user, index in ends:
            _take_maximum(model, user, index, f"{user.name}.{index}")


def _take_maximum(model: onnx_ir.Model, node: onnx_ir.Node, index: int, name: str) -> None:
    """Put a Max of one tensor before an input of a node."""
    source = present(node.inputs[index], f"input {index} of {node.name!r}")
    same = onnx_ir.node("Max", [source], name=name)
    (value,) = same.outputs
    value.type, value.shape = source.type, source.shape
    model.graph.insert_before(node, same)
    node.replace_input_with(index, value)


def _is_quantized(value: onnx_ir.Value) -> bool:
    """Return whether a QuantizeLinear uses a tensor, directly or after data movement."""
    return any(user.op_type == "QuantizeLinear" for user, _ in uses_after(value))
