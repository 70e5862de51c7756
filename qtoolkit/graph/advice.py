"""Advice on targets: quantized ops that integers make no faster there. A backend names the rules that hold for it."""

from collections.abc import Callable, Iterator, Mapping

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.finding import Finding
from qtoolkit.graph.placement.roles import is_quantizer, weight_is_float
from qtoolkit.op_kinds.nodes import kind_of, module_of, tensor_inputs

LEAST_CHANNELS = 16  # what one instruction of its integer kernels takes
LEAVE_FLOAT = "Leave it in float by the QConfigMapping, or measure."


def _few_channels(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    """Find layers that NVIDIA Model Optimizer's ONNX quantizer leaves out: too small to gain."""
    layer = _quantized_layer(node)
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    outputs, inputs = layer.weight.shape[:2]  # of a convolution, the inputs of a group
    if min(inputs, outputs) >= LEAST_CHANNELS or _is_worth_it(node, layer):
        return
    yield Finding(
        node.name,
        f"{backend.name} gains nothing from integers in a {kind_of(node)} of {inputs} to {outputs} channels: it needs "
        f"{LEAST_CHANNELS} of both.",
        LEAVE_FLOAT,
    )


def _is_worth_it(node: fx.Node, layer: nn.Module) -> bool:
    """Return whether a small convolution has kernels of its own: the first, those by eights, and depthwise ones."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    first = all(_origin(source).op == "placeholder" for source in tensor_inputs(node))
    if layer.groups > 1:
        return first or (layer.out_channels % 8 == 0 and min(layer.kernel_size) >= 3)
    by_eights = layer.in_channels % 8 == 0 and layer.out_channels % 8 == 0
    return first or (by_eights and len(set(layer.kernel_size)) == 1)


def _deconvolution(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    """Find transposed convolutions that TensorRT computes otherwise than planned (NVIDIA/TensorRT #1934, #2597, #4668)."""
    layer = _quantized_layer(node)
    if is_quantizer(node):
        origin = _origin(node.all_input_nodes[0])
        if kind_of(origin) == "conv_transpose" and not weight_is_float(origin):
            yield Finding(
                node.name,
                f"{backend.name} quantizes the output of the transposed convolution {origin.name!r} in a step of its own.",
                "Measure it, and leave the op that takes it in float where that is faster.",
            )
    if not isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return
    if isinstance(layer, nn.ConvTranspose3d):
        yield Finding(node.name, f"{backend.name} computes a transposed convolution in 3d in float16.", LEAVE_FLOAT)
    groups = layer.groups
    if groups > 1 and min(layer.in_channels, layer.out_channels) < 4 * groups:
        yield Finding(
            node.name,
            f"{backend.name} before 10.9 refuses a transposed convolution with groups of fewer than 4 channels, here "
            f"{layer.in_channels} to {layer.out_channels} in {groups}.",
            LEAVE_FLOAT,
        )


def _quantized_layer(node: fx.Node) -> nn.Module | None:
    is_layer = node.op == "call_module" and not is_quantizer(node)
    return module_of(node) if is_layer and not weight_is_float(node) else None


def _origin(node: fx.Node) -> fx.Node:
    """Return the op that a tensor comes from, through quantizers, batch norm, its activation and dropout."""
    while is_quantizer(node) or kind_of(node) in ("batch_norm", "identity", "relu"):
        node = node.all_input_nodes[0]
    return node


ADVICE: Mapping[str, Callable[[fx.Node, Backend], Iterator[Finding]]] = {
    "few channels": _few_channels,
    "deconvolution": _deconvolution,
}
