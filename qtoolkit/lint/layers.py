"""The weights of layers: rules that hold for the graphs of models and for files; and advice on layers that gain nothing."""

from collections.abc import Iterator, Mapping

from qtoolkit.backends import Backend
from qtoolkit.errors import with_article
from qtoolkit.lint.findings import MODEL_OPTIMIZER, TABLE, Broken, LintRule
from qtoolkit.lint.ops import Op, origin
from qtoolkit.op_kinds.kind import belongs_to_layer
from qtoolkit.runtimes.table import TENSORRT

LEAST_CHANNELS = 16  # of one instruction of TensorRT's integer kernels
LEAVE_FLOAT = "Leave it in float by the QConfigMapping, or measure."


def _grouped_conv_transpose(op: Op, backend: Backend) -> Iterator[Broken]:
    if not op.kind.transposed or op.layer is None or op.has_float_weight:
        return
    if op.layer.groups > 1:
        yield (
            f"{backend.name} has no integer kernel for a transposed convolution with groups, here {op.layer.groups}.",
            "Leave it in float by the QConfigMapping.",
        )


def _conv_transpose_axis(op: Op, backend: Backend) -> Iterator[Broken]:
    weight = op.weight if op.kind.transposed else None
    if weight is not None and not weight.blocks and weight.axis == 1 - backend.conv_transpose_axis:
        yield (
            f"its weight has a scale along axis {weight.axis}; {backend.name} takes them along axis "
            f"{backend.conv_transpose_axis}.",
            f"Set QuantSpec(axis={backend.conv_transpose_axis}) in the rule that names it.",
        )


def _weight_bits(op: Op, backend: Backend) -> Iterator[Broken]:
    weight = op.weight
    why = None if weight is None or weight.block_size else refused_bits(weight.bits, backend)
    if why is not None:
        yield f"{why}.", "Change its config."


def refused_bits(bits: int, backend: Backend) -> str | None:
    """Return why a target has no integer kernel for weights of so many bits; None where it has one."""
    if backend.weight_bits is None or bits in backend.weight_bits:
        return None
    return f"{backend.name} computes with weights of {' or '.join(map(str, backend.weight_bits))} bits, not {bits}"


def _few_channels(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find layers that NVIDIA Model Optimizer's ONNX quantizer leaves out: too small to gain."""
    layer = op.layer
    if layer is None or op.weight is None or not op.kind.is_plain_layer or not layer.outputs:
        return
    inputs, outputs = layer.inputs // layer.groups, layer.outputs  # of a convolution, the inputs of a group
    if min(inputs, outputs) >= LEAST_CHANNELS or (op.kind.convolves and _is_worth_it(op)):
        return
    yield (
        f"{backend.name} gains nothing from integers in {with_article(op.kind)} of {inputs} to {outputs} channels: it needs "
        f"{LEAST_CHANNELS} of both.",
        LEAVE_FLOAT,
    )


def _is_worth_it(op: Op) -> bool:
    """Return whether a small convolution has its own kernels: the first, depthwise ones, and channels in multiples of eight."""
    origins = [_origin(source) for source in op.inputs]
    first = all(source is not None and source.is_input for source in origins)
    layer = op.layer
    if layer is None or first:
        return first
    if layer.groups > 1:
        return layer.outputs % 8 == 0 and min(layer.kernel) >= 3
    return layer.inputs % 8 == 0 and layer.outputs % 8 == 0 and len(set(layer.kernel)) == 1


def _deconvolution(op: Op, backend: Backend) -> Iterator[Broken]:
    """Find transposed convolutions that TensorRT computes otherwise than planned."""
    if op.is_quantizer and op.inputs:
        before = _origin(op.inputs[0])
        if before is not None and before.kind.transposed and not before.has_float_weight:
            yield (
                f"{backend.name} quantizes the output of the transposed convolution {before.name!r} in its own step.",
                "Measure it, and leave the op that takes it in float where that is faster.",
            )
    layer = op.layer
    if not op.kind.transposed or layer is None or op.weight is None:
        return
    if len(layer.kernel) == 3:
        yield f"{backend.name} computes a transposed convolution in 3d in float16.", LEAVE_FLOAT
    if layer.groups > 1 and min(layer.inputs, layer.outputs) < 4 * layer.groups:
        yield (
            f"{backend.name} before 10.9 refuses a transposed convolution with groups of fewer than 4 channels, here "
            f"{layer.inputs} to {layer.outputs} in {layer.groups}.",
            LEAVE_FLOAT,
        )


def _origin(op: Op) -> Op | None:
    return origin(op, lambda kind: belongs_to_layer(kind) or kind.is_relu)


LAYERS = (
    LintRule(
        "grouped-conv-transpose",
        _grouped_conv_transpose,
        "NVIDIA/TensorRT #1934",
        lambda b: not b.grouped_conv_transpose,
    ),
    LintRule(
        "conv-transpose-axis", _conv_transpose_axis, "NVIDIA/TensorRT #1694, #1699, #2380; TensorRT 10.2 release notes"
    ),
    LintRule("weight-bits", _weight_bits, f"{TENSORRT.rules}; {TABLE}", lambda b: b.weight_bits is not None),
)

# Ops that are not faster in integers, by the names in `Backend.advice`.
ADVICE: Mapping[str, LintRule] = {
    "few channels": LintRule("few-channels", _few_channels, MODEL_OPTIMIZER),
    "deconvolution": LintRule("deconvolution", _deconvolution, "NVIDIA/TensorRT #1934, #2597, #4668"),
}
