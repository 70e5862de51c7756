"""Why a runtime does not fuse the nodes of a file into integer kernels. Rules for files only."""

from collections.abc import Iterator

import numpy as np

from qtoolkit.backends import Backend
from qtoolkit.errors import with_article
from qtoolkit.integer.onnxruntime import PAIRS_MOVE_PAST
from qtoolkit.lint.findings import MODEL_OPTIMIZER, ONNX, Broken, LintRule
from qtoolkit.lint.masked_attention import MASKED_SCORES
from qtoolkit.lint.ops import (
    FileCodes,
    Op,
    codes_of,
    end_of_unit,
    is_taken_by_codes,
    origin,
    serves_others,
    users_behind,
)
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.runtimes.table import ONNXRUNTIME, TENSORRT

CLIP_FUSION = "onnxruntime clip_quantizelinear.cc and qdq_util.cc; measured with 1.30"
CLIP_ERROR = 1.19e-7  # by which onnxruntime's ClipQuantFusion lets a bound differ


def _float_output(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find ops that are fused only if everything that takes their output takes it quantized."""
    takes = [source.quantizer is not None for source in op.inputs]
    if op.kind.name not in backend.needs_quantized_output or not takes or not all(takes) or op.has_float_weight:
        return
    if not op.kind.multiplies and all(serves_others(source, op, backend) for source in op.inputs):
        return  # it is float between ops in integers
    last = _behind_moving_pairs(end_of_unit(op, backend), backend)
    floats = [user for user in last.users if not user.is_quantizer]
    if not users_behind(last, backend):  # only the graph returns it: it keeps its precision
        return
    if floats or last.returned:
        taker = repr(floats[0].name) if floats else "the graph's output"
        yield (
            f"{with_article(op.kind)} is computed in integers only if every op that takes its output takes it quantized, and "
            f"{taker} does not.",
            f"Quantize the output of {last.name!r} once for all of these, or none of its inputs.",
        )


def _behind_moving_pairs(op: Op, backend: Backend) -> Op:
    """Return the last of the ops after an op past which onnxruntime moves a pair, or the op."""
    while len(op.users) == 1 and not op.returned and ONNXRUNTIME.runs(backend):
        if op.users[0].node.op_type not in PAIRS_MOVE_PAST:
            break
        op = op.users[0]
    return op


def _unrepeated_pair(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find ops that move quantized values in float, and so the ops after them too, because no pair stands between the two."""
    name = op.node.op_type
    if op.quantizer is None or name not in backend.repeated_pairs or name in PAIRS_MOVE_PAST:
        return
    taker = next((user for user in _behind_moving_pairs(op, backend).users if _takes_codes(user, backend)), None)
    joins = op.kind.pads_with_zero and len(op.users) == 1 and taker is not None and _is_convolution(taker)
    if taker is not None and not joins:
        yield (
            f"{with_article(name)} moves quantized values, and {taker.name!r} takes them without a QuantizeLinear and "
            f"a DequantizeLinear between the two; {backend.name} then computes both in float.",
            f"Repeat the pair of {op.quantizer.name!r} after {op.name!r}, with the same scale and zero point.",
        )


def _is_convolution(op: Op) -> bool:
    return op.kind.convolves and op.kind.is_plain_layer


def _takes_codes(op: Op, backend: Backend) -> bool:
    """Return whether an op that is no quantizer would take integers, or moves values to one that does."""
    if op.is_quantizer or op.has_float_weight:
        return False
    return backend.quantizes(op.kind) or (backend.role(op.kind) == "transparent" and is_taken_by_codes(op, backend))


def _mixed_types(op: Op, backend: Backend) -> Iterator[Broken]:
    if op.kind.name not in backend.needs_quantized_output and backend.role(op.kind) != "concat":
        return
    behind = [source.quantizer for source in op.inputs]
    after = [user for user in end_of_unit(op, backend).users if user.is_quantizer]
    types = {_type_as_run(codes) for q in (*behind, *after) if (codes := codes_of(q)) is not None}
    if len(types) > 1:
        yield (
            f"its inputs and its output are stored in different types ({', '.join(sorted(types))}); integer kernels need one.",
            "Quantize all of them as UINT8.",
        )


def _type_as_run(codes: FileCodes) -> str:
    """Return the integer type after onnxruntime has shifted INT8 to UINT8, which it does where one node takes them."""
    return "UINT8" if codes.dtype == "INT8" and codes.takers == 1 else codes.dtype


def _activation_before_quantizer(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find the ReLUs and clips that saturation does not replace, after layers that would be fused without them."""
    codes = codes_of(op)
    before = op.inputs[0] if codes is not None and op.inputs else None
    if codes is None or before is None or not before.kind.clips:
        return
    if not codes.has_zero_point:
        yield (
            f"it has no zero point and follows {before.name!r}; {backend.name} does not load such files.",
            "Give QuantizeLinear a zero point of 0.",
        )
        return
    layer = before.inputs[0] if before.inputs else None
    in_integers = layer is not None and any(source.quantizer is not None for source in layer.inputs)
    if layer is None or not in_integers or layer.kind.name not in backend.needs_quantized_output:
        return
    wrong = _unsaturated(before, op)
    if wrong:
        yield (
            f"{wrong} {before.name!r}, {layer.name!r} and it are not fused.",
            "Quantize the output of the ReLU without a sign, with the zero point at the lowest integer."
            if _is_relu(before)
            else "Choose the scale so that the range ends at the bounds or inside them, and drop the Clip.",
        )


def _is_relu(op: Op) -> bool:
    return bool(op.node.op_type == "Relu")


def _unsaturated(activation: Op, quantizer: Op) -> str:
    """Return why the range of the integers does not replace an activation; "" if it does."""
    codes, facts = codes_of(quantizer), activation.node
    if codes is None or codes.scale is None or codes.zero_point is None:
        return ""
    if codes.scale.size != 1 or codes.code_range == (0, 0):
        return ""
    scale, zero = np.float32(codes.scale.item()), int(codes.zero_point.item())
    if _is_relu(activation):
        below = codes.code_range[0] - zero
        return f"its lowest integer stands for {scale * below:.4g}, not 0:" if below else ""
    if facts.bounds is None:
        return "the bounds of the Clip are computed:"
    low, high = (scale * (code - zero) for code in codes.code_range)
    if facts.bounds[0] - low <= CLIP_ERROR and high - facts.bounds[1] <= CLIP_ERROR:
        return ""
    return f"its range is {low:.7g} to {high:.7g}, beyond the bounds of the Clip:"


def _inside_silu(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.kind.elementwise_product or len(op.inputs) != 2:
        return
    for gate, x in (op.inputs, reversed(op.inputs)):
        sigmoid = origin(gate, _nothing)
        if sigmoid is None or not sigmoid.kind.is_sigmoid or not sigmoid.inputs:
            continue
        layer = origin(sigmoid.inputs[0], _nothing)
        quantized = gate.is_quantizer or x.is_quantizer or sigmoid.inputs[0].is_quantizer
        if layer is origin(x, _nothing) and layer is not None and layer.kind.layer and quantized:
            yield (
                f"a quantizer stands inside the SiLU of {layer.name!r}, which the target computes as one with it.",
                "Quantize the output of the SiLU only.",
            )
            return


def _nothing(_: OpKind) -> bool:
    return False


def _unknown_op(op: Op, backend: Backend) -> Iterator[Broken]:
    facts = op.node
    if facts.domain in ("", "ai.onnx.ml", "com.microsoft"):
        return
    if any(source.quantizer is not None for source in op.inputs):
        yield (
            f"{facts.op_type!r} of domain {facts.domain!r} takes quantized values; a plugin computes in integers only if it "
            f"declares integer inputs and outputs.",
            "Declare them in the plugin, or leave its inputs in float.",
        )


def _windows_beyond(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find average pools whose windows beyond the edge onnxruntime's integer kernel divides by their whole size."""
    between = op.quantizer is None and all(source.quantizer for source in op.inputs)
    if not op.node.reaches_beyond or not between or not any(user.is_quantizer for user in op.users):
        return
    padded = any(source.kind.pads_with_zero for source in op.inputs)  # which becomes part of the pool
    if op.node.counts_padding or padded:
        yield (
            "onnxruntime's integer kernel divides windows beyond the edge (ceil_mode) by their whole size where padding "
            "counts; the model divides by the part inside of the padding.",
            "Put a Pad, a QuantizeLinear and a DequantizeLinear of the same scale in front of it, with count_include_pad=0, as "
            "qtoolkit.export_onnx does.",
        )


def _for_floats_only(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find quantizers that cost accuracy and bring no integer kernel."""
    if not op.is_quantizer or op.of_weight or not op.inputs:
        return
    before = origin(op.inputs[0])
    if before is not None and backend.quantizes(before.kind) and not before.kind.multiplies:
        return
    users = users_behind(op, backend)
    useful = [u for u in users if u.is_quantizer or backend.quantizes(u.kind)]
    if not useful and not op.returned:
        takers = ", ".join(sorted({repr(user.name) for user in users})[:3]) or "nothing"
        yield f"only {takers} takes its values, in float: it costs accuracy and saves nothing.", "Remove it."


FUSIONS = (
    LintRule("quantized-output", _float_output, ONNXRUNTIME.rules, lambda b: bool(b.needs_quantized_output)),
    LintRule("repeated-pair", _unrepeated_pair, ONNXRUNTIME.rules, lambda b: bool(b.repeated_pairs)),
    LintRule("edge-windows", _windows_beyond, ONNXRUNTIME.rules, ONNXRUNTIME.runs),
    LintRule("one-type", _mixed_types, ONNXRUNTIME.rules, ONNXRUNTIME.runs),
    LintRule("saturation", _activation_before_quantizer, CLIP_FUSION, ONNXRUNTIME.runs),
    LintRule("silu", _inside_silu, MODEL_OPTIMIZER, lambda b: not b.splits_silu and not b.quantize_outputs),
    MASKED_SCORES,
    LintRule("plugin", _unknown_op, TENSORRT.rules, TENSORRT.runs),
)

FILE_ADVICE = (
    LintRule("floats-only", _for_floats_only, f"{TENSORRT.rules}; {ONNX}", lambda b: not b.quantize_outputs),
)
