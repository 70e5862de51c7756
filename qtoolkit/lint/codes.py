"""How a file stores quantized values: types, scales, zero points, axes and biases. Rules for files only."""

from collections.abc import Iterator

import numpy as np

from qtoolkit.backends import Backend
from qtoolkit.lint.findings import IMPORTER, ONNX, Broken, LintRule
from qtoolkit.lint.ops import FileCodes, Op, codes_of, first_opset, users_behind
from qtoolkit.runtimes.execution import Array
from qtoolkit.runtimes.table import ONNXRUNTIME, OPENVINO, TENSORRT

# The types of activations that TensorRT computes with, and those that it takes of weights too.
TENSORRT_TYPES, TENSORRT_WEIGHT_TYPES = ("INT8", "FLOAT8E4M3FN"), ("INT4", "FLOAT4E2M1")
BIAS_TOLERANCE = 0.01  # onnxruntime's, of a bias's scale
INT4_BLOCKS = (64, 128)


def stored(op: Op) -> Iterator[tuple[str, FileCodes]]:
    """Return how a quantizer, or a layer's weight, is stored, each with its name in findings."""
    named = {"it": op.node.codes, "its weight": op.node.weight}
    return ((what, codes) for what, codes in named.items() if codes is not None)


def _zero_point(op: Op, backend: Backend) -> Iterator[Broken]:
    for what, codes in stored(op):
        if codes.is_asymmetric or (codes.has_zero_point and codes.zero_point is None):
            yield (
                f"{what} has a zero point that is not the constant 0; {backend.name} takes symmetric quantization only.",
                "Quantize with symmetric=True, and store weights in int8 (weight_codes='int8' of export_onnx).",
            )


def _code_type(op: Op, backend: Backend) -> Iterator[Broken]:
    for what, codes in stored(op):
        known = _types(backend, of_weight=codes is op.node.weight)
        if codes.dtype not in known:
            yield (
                f"{what} is stored in {codes.dtype}; {backend.name} computes in integers with {', '.join(known)}.",
                f"Store it in {known[0]}, or leave the op in float.",
            )


def _types(backend: Backend, *, of_weight: bool) -> tuple[str, ...]:
    if TENSORRT.runs(backend):
        return TENSORRT_TYPES + (TENSORRT_WEIGHT_TYPES if of_weight else ())
    return ("INT8", "UINT8")


def _scale(op: Op, backend: Backend) -> Iterator[Broken]:
    for what, codes in stored(op):
        values = None if codes.scale is None else np.asarray(codes.scale, np.float32)
        if values is None:
            text = "has a scale that is computed in the graph; the target needs a constant."
        elif not np.isfinite(values).all() or (values <= 0).any():
            text = "has a scale that is not positive and finite."
        else:
            continue
        yield f"{what} {text}", "Calibrate it, and write the scale as a constant."


def _activation_axis(op: Op, backend: Backend) -> Iterator[Broken]:
    codes = codes_of(op)
    if OPENVINO.runs(backend) and all(map(_is_depthwise, users_behind(op, backend))):  # its channels are not summed
        return
    if codes is not None and (codes.axis is not None or codes.block_size):
        yield (
            "an activation has more than one scale; integer kernels sum over its channels, and need one.",
            "Quantize activations per tensor, and weights per channel.",
        )


def _is_depthwise(op: Op) -> bool:
    layer = op.layer
    return layer is not None and op.kind.convolves and op.kind.is_plain_layer and layer.groups == layer.inputs > 1


def _weight_axis(op: Op, backend: Backend) -> Iterator[Broken]:
    layer, weight = op.layer, op.weight
    if layer is None or weight is None or weight.blocks or not op.kind.is_plain_layer:
        return
    if weight.axis is not None and weight.axis != layer.output_axis:
        yield (
            f"its weight has a scale along axis {weight.axis}, which is summed over; the output channels are axis "
            f"{layer.output_axis}.",
            f"Write the scales along axis {layer.output_axis}.",
        )


def _bias(op: Op, backend: Backend) -> Iterator[Broken]:
    if op.node.bias is not None:
        yield (
            f"its bias is quantized; {backend.name} adds biases in float.",
            "Store the bias in float, without DequantizeLinear.",
        )


def _bias_scale(op: Op, backend: Backend) -> Iterator[Broken]:
    facts = op.node
    if facts.bias is None or facts.weight is None or not op.inputs:
        return
    scales = [
        c.scale
        for c in (codes_of(op.inputs[0].quantizer), facts.weight, facts.bias)
        if c is not None and c.scale is not None
    ]
    if facts.bias.dtype != "INT32":
        text = f"its bias is stored in {facts.bias.dtype}; integer kernels add INT32."
    elif len(scales) < 3 or not _is_product(*scales):
        text = "the scale of its bias is not the product of the scales of its input and its weight."
    else:
        return
    yield (text, "Store the bias in float, or as INT32 with that scale.")


def _is_product(x: Array, weight: Array, bias: Array) -> bool:
    with np.errstate(all="ignore"):
        expected = np.asarray(x, np.float64).ravel() * np.asarray(weight, np.float64).ravel()
        if expected.size == 1 or bias.size in (1, expected.size):
            return bool(np.allclose(np.asarray(bias, np.float64).ravel(), expected, rtol=BIAS_TOLERANCE, atol=0.0))
    return False


def _opset(op: Op, backend: Backend) -> Iterator[Broken]:
    facts = op.node
    for what, codes in stored(op):
        by_axis = codes.axis is not None or ONNXRUNTIME.runs(backend)
        needed = first_opset(codes.dtype, by_axis=by_axis, blocks=codes.block_size > 0)
        if facts.opset < needed:
            yield (
                f"{what} needs opset {needed}, and the file has {facts.opset}.",
                f"Write the file with opset {needed} or newer.",
            )


def _blocks(op: Op, backend: Backend) -> Iterator[Broken]:
    weight = op.weight
    if weight is None or not weight.block_size or weight.bits != 4 or op.node.weight.dtype != "INT4":
        return
    if op.kind.convolves or not op.kind.layer or weight.block_size not in INT4_BLOCKS:
        yield (
            f"its weight is stored in INT4 in blocks of {weight.block_size}; {backend.name} takes blocks of "
            f"{' or '.join(map(str, INT4_BLOCKS))}, in linear layers.",
            f"Quantize with group_size={INT4_BLOCKS[0]}.",
        )


def _casts(op: Op, backend: Backend) -> Iterator[Broken]:
    if op.node.op_type != "Cast" or not op.inputs or not op.inputs[0].is_quantizer:
        return
    taken = next((user for user in op.users if user.kind.multiplies), None)
    if taken is not None:
        yield (
            f"a Cast stands between the quantizer {op.inputs[0].name!r} and {taken.name!r}, which then computes in float.",
            "Give scales the type of the float tensors, so that DequantizeLinear returns it.",
        )


def _deconvolution_zero_point(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.kind.transposed or op.weight is None or not op.inputs:
        return
    taken = {"input": codes_of(op.inputs[0].quantizer), "weight": op.node.weight}
    found = [what for what, codes in taken.items() if codes is not None and codes.is_asymmetric]
    if found:
        yield (
            f"the {' and the '.join(found)} of a transposed convolution has a zero point, so that {backend.name} computes it "
            f"in float.",
            "Quantize it with symmetric=True.",
        )


def _weight_zero_point(op: Op, backend: Backend) -> Iterator[Broken]:
    codes = op.node.weight
    convolution = op.kind.convolves and not op.kind.transposed
    if convolution and op.inputs and codes is not None and codes.is_asymmetric:
        yield (
            f"the weight of a convolution has a zero point, so that {backend.name} computes it in float.",
            "Quantize it with symmetric=True, and store it in int8 (weight_codes='int8' of export_onnx).",
        )


CODES = (
    LintRule("symmetric", _zero_point, f"{TENSORRT.rules}; {IMPORTER}", TENSORRT.runs),
    *(LintRule("code-type", _code_type, each.rules, each.runs) for each in (TENSORRT, ONNXRUNTIME, OPENVINO)),
    LintRule("constant-scale", _scale, f"{TENSORRT.rules}; {ONNXRUNTIME.rules}"),
    LintRule("activation-axis", _activation_axis, f"{TENSORRT.rules}; {ONNXRUNTIME.rules}; {OPENVINO.rules}"),
    LintRule("weight-axis", _weight_axis, f"{TENSORRT.rules}; {IMPORTER}"),
    LintRule("float-bias", _bias, f"{TENSORRT.rules}; {IMPORTER}", TENSORRT.runs),
    LintRule("bias-scale", _bias_scale, f"{ONNXRUNTIME.rules}; onnxruntime PR 28229", lambda b: b.integer_bias),
    LintRule("opset", _opset, ONNX),
    LintRule("int4-blocks", _blocks, TENSORRT.rules, TENSORRT.runs),
    LintRule("cast", _casts, TENSORRT.rules, TENSORRT.runs),
    LintRule("weight-zero-point", _weight_zero_point, f"measured with 2026.4, {OPENVINO.rules}", OPENVINO.runs),
    LintRule("deconvolution-zero-point", _deconvolution_zero_point, OPENVINO.rules, OPENVINO.runs),
)
