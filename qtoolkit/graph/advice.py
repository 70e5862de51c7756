"""Findings of lint, and advice: quantized ops that a target computes no faster in integers. A backend names its rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.placement.traversal import AFTER_A_LAYER, origin
from qtoolkit.op_kinds.nodes import has_float_weight, is_quantizer, kind_of, module_of, name_of, tensor_inputs

LEAST_CHANNELS = 16  # of one instruction of TensorRT's integer kernels
LEAVE_FLOAT = "Leave it in float by the QConfigMapping, or measure."


@dataclass(frozen=True)
class Finding:
    """An edge or op that the target would not compute as planned.

    Attributes:
        where: The name of the op, as a QConfigMapping takes it; of a quantizer, the name of its submodule.
        rule: What the target asks for, and what is found instead.
        remedy: What to change.
    """

    where: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule} {self.remedy}"


def _few_channels(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    """Find layers that NVIDIA Model Optimizer's ONNX quantizer leaves out: too small to gain."""
    layer = _quantized_layer(node)
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    outputs, inputs = layer.weight.shape[:2]  # of a convolution, the inputs of a group
    if min(inputs, outputs) >= LEAST_CHANNELS or _is_worth_it(node, layer):
        return
    yield Finding(
        name_of(node),
        f"{backend.name} gains nothing from integers in a {kind_of(node)} of {inputs} to {outputs} channels: it needs "
        f"{LEAST_CHANNELS} of both.",
        LEAVE_FLOAT,
    )


def _is_worth_it(node: fx.Node, layer: nn.Module) -> bool:
    """Return whether a small convolution has kernels of its own: the first, those by eights, and depthwise ones."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    origins = [_origin(source) for source in tensor_inputs(node)]
    first = all(source is not None and source.op == "placeholder" for source in origins)
    if layer.groups > 1:
        return first or (layer.out_channels % 8 == 0 and min(layer.kernel_size) >= 3)
    by_eights = layer.in_channels % 8 == 0 and layer.out_channels % 8 == 0
    return first or (by_eights and len(set(layer.kernel_size)) == 1)


def _deconvolution(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    """Find transposed convolutions that TensorRT computes otherwise than planned (NVIDIA/TensorRT #1934, #2597, #4668)."""
    layer = _quantized_layer(node)
    if is_quantizer(node):
        layer_node = _origin(node.all_input_nodes[0])
        if layer_node is not None and kind_of(layer_node).name == "conv_transpose" and not has_float_weight(layer_node):
            yield Finding(
                name_of(node),
                f"{backend.name} quantizes the output of the transposed convolution {name_of(layer_node)!r} in its own step.",
                "Measure it, and leave the op that takes it in float where that is faster.",
            )
    if not isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return
    if isinstance(layer, nn.ConvTranspose3d):
        yield Finding(name_of(node), f"{backend.name} computes a transposed convolution in 3d in float16.", LEAVE_FLOAT)
    groups = layer.groups
    if groups > 1 and min(layer.in_channels, layer.out_channels) < 4 * groups:
        yield Finding(
            name_of(node),
            f"{backend.name} before 10.9 refuses a transposed convolution with groups of fewer than 4 channels, here "
            f"{layer.in_channels} to {layer.out_channels} in {groups}.",
            LEAVE_FLOAT,
        )


def _quantized_layer(node: fx.Node) -> nn.Module | None:
    is_layer = node.op == "call_module" and not is_quantizer(node)
    return module_of(node) if is_layer and not has_float_weight(node) else None


def _origin(node: fx.Node) -> fx.Node | None:
    return origin(node, (*AFTER_A_LAYER, "relu"))


ADVICE: Mapping[str, Callable[[fx.Node, Backend], Iterator[Finding]]] = {
    "few channels": _few_channels,
    "deconvolution": _deconvolution,
}
