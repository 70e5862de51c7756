"""The places of quantizers: rules that hold for the graphs of models and for files.

The rules come from TensorRT's documentation on the placement of Q/DQ ("Working with Quantized Types"), from NVIDIA Model
Optimizer's ONNX quantizer, and from the backend's table. The backend's fields say which of them apply.
"""

from collections.abc import Iterator

from qtoolkit.backends import Backend
from qtoolkit.errors import with_article
from qtoolkit.lint import residual
from qtoolkit.lint.findings import MODEL_OPTIMIZER, Broken, LintRule
from qtoolkit.lint.ops import Op, end_of_unit, is_taken_by_codes, origin, serves_others, takes_into_unit, users_behind
from qtoolkit.op_kinds.table import KINDS
from qtoolkit.runtimes.table import TENSORRT


def _inside_a_unit(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.is_quantizer or len(op.users) != 1 or not op.inputs:
        return
    source, user = op.inputs[0], op.users[0]
    layer = origin(source) or source
    begins = len(source.users) == 1 and (source.kind.layer or source.kind.normalizes_batches)
    # Behind layers that need no quantized output, placement lets activations join that the target does not fuse.
    fused = user.kind.normalizes_batches or user.kind.name in backend.joined_activations
    if begins and fused and takes_into_unit(layer.kind, user.kind, backend):
        yield (
            f"a quantizer stands between {source.name!r} and {user.name!r}, which the target computes as one.",
            f"Move it after {user.name!r}.",
        )


def _some_inputs(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.kind.multiplies or backend.role(op.kind) == "float":
        return
    weight = op.weight
    if weight is not None and weight.block_size:  # the target expands the weight, and computes in float
        return
    inputs = {source: source.quantizer is not None for source in op.inputs if not _inside_attention(source, backend)}
    if not backend.quantize_graph_inputs:
        inputs = {source: on_grid for source, on_grid in inputs.items() if not source.is_input}
    quantized = [*inputs.values(), *([] if op.layer is None else [weight is not None])]
    if op.has_float_weight and all(serves_others(source, op, backend) for source in op.inputs):
        return
    if any(quantized) and not all(quantized):
        missing = next((source.name for source, on_grid in inputs.items() if not on_grid), f"{op.name}.weight")
        yield (
            f"{with_article(op.kind)} is computed in integers only if all its inputs are quantized, and {missing!r} is not.",
            "Quantize all of them or none.",
        )


def _inside_attention(source: Op, backend: Backend) -> bool:
    """Return whether a tensor is attention's probabilities, on a target whose one op of attention has no quantizer there.

    For targets with kernels for the other product, such as OpenVINO: see `qtoolkit.backends`.
    """
    probabilities = origin(source, lambda kind: kind.returns_input)
    is_softmax = probabilities is not None and probabilities.kind.normalizes_scores
    return is_softmax and any(backend.quantizes(kind) for kind in KINDS.values() if kind.holds_softmax)


def _concat(op: Op, backend: Backend) -> Iterator[Broken]:
    if backend.role(op.kind) != "concat":
        return
    behind = [source.quantizer for source in op.inputs]
    if any(behind) and len({q and q.grid for q in behind}) > 1 and is_taken_by_codes(op, backend):
        yield (
            "the inputs of a concat have different scales, so that the target requantizes them.",
            "Let one quantizer serve all of them.",
        )


def _requantized(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.is_quantizer or op.of_weight or not op.inputs:
        return
    before = op.inputs[0].quantizer
    if before is not None and before.grid != op.grid:
        yield (
            f"it quantizes the output of {before.name!r} again, with another scale or zero point.",
            f"Give both the same scale and zero point, or remove {op.name!r}.",
        )


def _in_and_out(op: Op, backend: Backend) -> Iterator[Broken]:
    if backend.role(op.kind) not in ("compute", "merge") or not backend.is_float_without_quantized_output(op.kind):
        return
    if any(residual.fusing_layer(source) is not None for source in op.inputs):
        return
    takes = any(source.quantizer is not None for source in op.inputs)
    if takes and not any(user.is_quantizer for user in users_behind(end_of_unit(op, backend), backend)):
        yield (
            f"{with_article(op.kind)} takes quantized inputs and its output is not quantized; the target needs both or "
            "neither.",
            "Quantize its output, or leave it in float by the QConfigMapping.",
        )


def _pad_before_quantizer(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.is_quantizer or not op.inputs or not op.inputs[0].kind.pads_with_zero:
        return
    pad = op.inputs[0]
    before = pad.quantizer
    if before is None or before.grid != op.grid:
        yield (
            f"the quantizer comes after {pad.name!r}, which then cannot become part of the layer after it.",
            f"Move it before {pad.name!r}.",
        )


def _two_quantizers(op: Op, backend: Backend) -> Iterator[Broken]:
    quantizers = {user.grid: user for user in op.users if user.is_quantizer and not user.of_weight}
    if len(quantizers) > 1:
        yield (
            f"its output has {len(quantizers)} quantizers ({', '.join(user.name for user in quantizers.values())}).",
            "Keep one for all that take it.",
        )


PLACEMENT = (
    *residual.RULES,
    LintRule("inside-a-unit", _inside_a_unit, TENSORRT.rules),
    LintRule("all-inputs", _some_inputs, TENSORRT.rules),
    LintRule("shared-concat", _concat, f"{MODEL_OPTIMIZER}; {TENSORRT.rules}", lambda b: b.shared_concat),
    LintRule("requantized", _requantized, f"{TENSORRT.rules}; onnxruntime double_qdq_pairs_remover.cc"),
    LintRule("in-and-out", _in_and_out, TENSORRT.rules, lambda b: b.integers_in_and_out),
    LintRule("pad", _pad_before_quantizer, "NVIDIA/TensorRT #2592"),
    LintRule("one-quantizer", _two_quantizers, f"{TENSORRT.rules}; {MODEL_OPTIMIZER}"),
)
