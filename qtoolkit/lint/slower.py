"""Why an engine of a file is no faster than one in float16: rules of files for targets that take the types of a file.

Their networks are strongly typed: tensors that are float32 in a file are computed in float32. The rules are advice: a file
that breaks one is computed as planned.
"""

from collections.abc import Collection, Iterator, Sequence

from qtoolkit.backends import Backend
from qtoolkit.errors import some
from qtoolkit.lint.engine import attention_of, float_type, is_on_codes, is_pointwise, why_not_fused
from qtoolkit.lint.findings import MODEL_OPTIMIZER, Broken, BrokenAt, GraphRule, LintRule
from qtoolkit.lint.ops import LayerFacts, Op, end_of_unit, origin, users_behind
from qtoolkit.op_kinds.float32 import FLOAT32_OPS
from qtoolkit.op_kinds.kind import belongs_to_layer
from qtoolkit.op_kinds.reached import reached
from qtoolkit.runtimes.table import TENSORRT

STRONG_TYPES = "TensorRT 11, strongly typed networks; ultralytics #26159, !26167; NVIDIA/TensorRT #4807"
FLOAT16_SCALES = "NVIDIA Model Optimizer !1289"
TO_FLOAT16 = (
    'Write it with float_type="float16" and scales of float16 (scale_dtype="float16"), as qtoolkit.export_onnx does for '
    "this target; a file of another tool becomes float16 by modelopt.onnx.autocast."
)
REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"})
OF_NORMS = frozenset({"Add", "Clip", "Div", "Max", "Mul", "Pow", "Reciprocal", "Sqrt"})  # beside the reduction
INT8_CHANNELS = 32  # of one instruction of tensor cores in int8; kernels pad to it
FEW_INPUTS = 4  # channels of images


def takes_types_as_they_are(backend: Backend) -> bool:
    """Return whether a target computes each tensor in the type that a file gives it, and these rules hold for it."""
    return TENSORRT.runs(backend) and backend.float_type == "float16"


def _float32_floats(ops: Sequence[Op], backend: Backend) -> Iterator[BrokenAt]:
    """Find that all floats of a file are float32."""
    if _is_in_float32(ops):
        computing = [op for op in ops if not op.is_quantizer and not op.is_input and float_type(op)]
        floats = [op for op in computing if not is_on_codes(op, backend)]
        layers = len(computing) - len(floats)
        yield (
            computing[0],
            f"all floats of this file are float32: {len(floats)} ops beside {layers} in integers. {backend.name} "
            f"computes each tensor in the type that the file gives it: these ops take twice the bytes of float16 and slower "
            f"kernels, so that the engine may be slower than one in float16.",
            TO_FLOAT16,
        )


def _is_in_float32(ops: Sequence[Op]) -> bool:
    """Return whether no float of a file is float16, without the inputs and their Casts."""
    types = {float_type(op) for op in ops if not (op.is_input or op.is_quantizer) and op.node.op_type != "Cast"}
    return "float32" in types and "float16" not in types


def _float32_island(ops: Sequence[Op], backend: Backend) -> Iterator[BrokenAt]:
    """Find ops in float32 that a file in float16 has between others, except ops that lose accuracy in float16."""
    if _is_in_float32(ops):
        return
    left = [op for op in ops if _is_float32(op)]
    while left:
        island = set(reached(left[:1], lambda op: filter(_stays_float32, (*op.inputs, *op.users))))
        computing = [op for op in left if op in island]
        if not _is_norm(island):
            kinds = some(sorted({repr(op.node.op_type) for op in computing}))
            yield (
                left[0],
                f"{len(computing)} ops compute in float32 between others in float16 ({kinds}), and {backend.name} does not "
                f"change their type.",
                "Give them the type of their inputs, unless they overflow in float16.",
            )
        left = [op for op in left if op not in island]


def _is_norm(island: Collection[Op]) -> bool:
    """Return whether ops in float32 compute a norm: a mean or a sum of squares, and what divides by it."""
    types = {op.node.op_type for op in island if not op.kind.moves}
    return bool(types & REDUCTIONS) and types - REDUCTIONS <= OF_NORMS


def _is_float32(op: Op) -> bool:
    """Return whether an op computes in float32, and is none that loses accuracy in float16."""
    return _stays_float32(op) and not op.kind.moves and op.node.op_type not in FLOAT32_OPS


def _stays_float32(op: Op) -> bool:
    return not (op.is_input or op.is_quantizer or op.kind.returns_input) and float_type(op) == "float32"


def _cast_between(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find Casts of floats that are not at the ends of the file, nor at the border of ops in float32."""
    source = origin(op.inputs[0], lambda kind: kind.returns_input or kind.moves) if op.inputs else None
    if op.node.op_type != "Cast" or source is None or not float_type(op) or not float_type(source):
        return
    if any(user.node.op_type == "Cast" for user in op.users):  # the last of a chain is reported
        return
    users = users_behind(op, backend)
    in_float32 = [each for each in (source, *users) if _is_float32(each) or each.node.op_type in FLOAT32_OPS]
    ends = op.returned or source.is_input or any(user.returned for user in users if user.node.op_type == "Cast")
    if not in_float32 and not ends:
        taker = repr(users[0].name) if users else "nothing"
        yield (
            f"a Cast to {float_type(op)} stands between {source.name!r} and {taker}: a pass over the tensor, which keeps the "
            f"target from fusing the two.",
            "Give scales and constants the type of the floats, and drop it.",
        )


def _convolution_on_codes(op: Op, backend: Backend) -> LayerFacts | None:
    """Return the facts about a convolution that computes in integers; None for any other op."""
    return op.layer if op.kind.convolves and is_on_codes(op, backend) else None


def _first_layer(op: Op, backend: Backend) -> Iterator[Broken]:
    layer = _convolution_on_codes(op, backend)
    if layer is None or not layer.inputs:
        return
    first = all((maker := _float_maker(source)) is not None and maker.is_input for source in op.inputs)
    if first and layer.inputs // layer.groups <= FEW_INPUTS:
        yield (
            f"the first layer takes {layer.inputs} channels: kernels in int8 pad them to {INT8_CHANNELS}, and the image is "
            f"quantized in a pass of its own.",
            "Leave it in float, and measure: excluded from the QConfigMapping, it computes in float16.",
        )


def _grouped(op: Op, backend: Backend) -> Iterator[Broken]:
    layer = _convolution_on_codes(op, backend)
    if layer is None or layer.groups <= 1:
        return
    what = "depthwise convolution" if layer.groups == layer.inputs else f"convolution in {layer.groups} groups"
    yield (
        f"a {what} does not use tensor cores in int8: it saves bytes, but no products, and may be slower than in float16.",
        "Measure it alone in both types, and leave it in float where that is faster.",
    )


def _lone_layer(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find convolutions in int8 between floats: the tensor is brought into the layout of int8 kernels, and back."""
    if _convolution_on_codes(op, backend) is None:
        return
    maker = _float_maker(op.inputs[0])
    if maker is None or maker.is_input or is_on_codes(maker, backend):
        return
    last = end_of_unit(op, backend)
    while len(last.users) == 1 and is_pointwise(last.users[0]) and not last.returned:
        last = last.users[0]
    users = users_behind(last, backend)
    if users and not any(user.is_quantizer or is_on_codes(user, backend) for user in users):
        yield (
            f"it is the only layer in int8 between {maker.name!r} and {users[0].name!r}, which compute in float: its input and "
            f"its output are converted and reordered for it alone.",
            "Quantize its neighbours too, or leave it in float.",
        )


def _float_maker(source: Op) -> Op | None:
    """Return the op that computes a quantized tensor, through ops that are fused into it."""
    return origin(source, lambda kind: belongs_to_layer(kind) or kind.moves or kind.activation or kind.elementwise)


def _unfused_attention(op: Op, backend: Backend) -> Iterator[Broken]:
    attention = attention_of(op) if op.kind.normalizes_scores else ()
    if not attention:
        return
    why = why_not_fused(attention, backend)
    if why:
        yield (
            f"the attention around it is not computed as one: {why}. Its scores, of the length of the sequence squared, are "
            f"written and read.",
            "Write its products in float16, or quantize both of them and the softmax between them.",
        )
    scale = next((each for each in attention[1 : attention.index(op)] if each.kind.with_constant), None)
    if scale is not None:
        yield (
            f"{scale.name!r} scales the scores after the product; the target asks for scaled queries or keys before it.",
            "Multiply the queries by the scale.",
        )


def _sigmoid_gate(op: Op, backend: Backend) -> Iterator[Broken]:
    if op.node.faster_by_tanh and float_type(op) == "float16":
        yield (
            "a SiLU of Sigmoid and Mul is not fused with the layer before it.",
            "Write it as x * (0.5 * tanh(0.5 * x) + 0.5).",
        )


SLOWER: tuple[LintRule | GraphRule, ...] = (
    GraphRule("float32-floats", _float32_floats, STRONG_TYPES, takes_types_as_they_are),
    GraphRule("float32-island", _float32_island, STRONG_TYPES, takes_types_as_they_are),
    LintRule("float-cast", _cast_between, FLOAT16_SCALES, takes_types_as_they_are),
    LintRule("first-layer", _first_layer, f"NVIDIA/TensorRT #1310; {MODEL_OPTIMIZER}", takes_types_as_they_are),
    LintRule("grouped-conv", _grouped, "NVIDIA/TensorRT #4529, #1409", takes_types_as_they_are),
    LintRule("lone-layer", _lone_layer, "NVIDIA/TensorRT #1423, #4554", takes_types_as_they_are),
    LintRule(
        "unfused-attention",
        _unfused_attention,
        "TensorRT, fused attention; NVIDIA/TensorRT #2981",
        takes_types_as_they_are,
    ),
    LintRule("sigmoid-gate", _sigmoid_gate, "ultralytics !26223", takes_types_as_they_are),
)
