"""Kernels of layers: convolutions, transposed convolutions, linear layers and matrix products."""

from collections.abc import Mapping
from typing import Any

import torch

from qtoolkit.export.tflite.flatbuffer import TensorInFile
from qtoolkit.export.tflite.moves import cut
from qtoolkit.export.tflite.ops import IMAGE, TfliteOp
from qtoolkit.export.tflite.windows import Window, dilations, pad, padded, strides, two


def conv2d(op: TfliteOp) -> TensorInFile:
    """Add a convolution; with one group per channel it is depthwise."""
    x, size = op.image("input"), op.args["weight"].meta["val"].shape[2:]
    window = Window.of(op.args, size, x.shape[2:], op.shape[2:])
    image, padding = padded(op, x, window)
    kernel, inputs, options = _convolution(op, x, image, window, padding)
    return op.emit(kernel, inputs, x, **options)


def conv1d(op: TfliteOp) -> TensorInFile:
    """Compute a convolution over a line as one over an image of height 1."""
    x, size = op.value("input"), op.args["weight"].meta["val"].shape[2]
    n, channels, length = x.shape
    image = op.ordered(op.reshaped(x, (n, channels, 1, length)), IMAGE)
    window = Window.of(_of_image(op.args), (1, size), (1, length), (1, op.shape[2]))
    if any(any(ends) for ends in window.padding):
        image = pad(op, image, [(0, 0), (0, 0), *window.padding])
    kernel, inputs, options = _convolution(op, x, image, window, "VALID")
    like = TensorInFile(-1, (n, op.shape[1], 1, op.shape[2]), IMAGE, op.scales)
    return op.reshaped(op.step(kernel, inputs, like, **options), op.shape, op.name)


def _convolution(
    op: TfliteOp, x: TensorInFile, image: TensorInFile, window: Window, padding: str
) -> tuple[str, list[TensorInFile | int], dict[str, int]]:
    """Return the kernel of a convolution over an image, its inputs and its options."""
    out, per_group, *sizes = op.args["weight"].meta["val"].shape
    options = {**strides(op, window, padding), **dilations(window)}
    options["fusedActivationFunction"] = op.joined
    along = range(2, 2 + len(sizes))
    if per_group == 1 and op.args["groups"] > 1:
        weight, scales = op.weight("weight", (1, *along, 0), 3, (1, *window.size, out))
        options |= {"depthMultiplier": out // op.args["groups"]}
        return "DEPTHWISE_CONV_2D", [image, weight, op.bias(x, scales, out)], options
    weight, scales = op.weight("weight", (0, *along, 1), 0, (out, *window.size, per_group))
    return "CONV_2D", [image, weight, op.bias(x, scales, out)], options


def _of_image(args: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments of a convolution over a line in the form of one over an image."""
    found: dict[str, object] = {}
    for name, neutral in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = args[name]
        found[name] = value if isinstance(value, str) else (neutral, two(value)[0])
    return found


def conv_transpose2d(op: TfliteOp) -> TensorInFile:
    """Compute the full output, and slice off the padding if "SAME" does not remove it."""
    if op.args["groups"] != 1 or any(d != 1 for d in two(op.args["dilation"])):
        raise ValueError(
            f"export_litert: LiteRT's transposed convolution supports no groups and no dilation; {op.node.name!r} has "
            f"groups={op.args['groups']} and dilation={tuple(op.args['dilation'])}. Replace the layer."
        )
    x, (_, channels, *size) = op.image("input"), op.args["weight"].meta["val"].shape
    out, image, before = op.shape[2:], x.shape[2:], two(op.args["padding"])
    window = Window.of(op.args, size, out, image)  # of the convolution that goes the other way
    same = any(before) and window.is_same(out, image)
    full = [max((image[d] - 1) * window.stride[d] + size[d], before[d] + out[d]) for d in range(2)]
    is_cut = not same and tuple(full) != out
    full = full if is_cut else list(out)
    weight, scales = op.weight("weight", (1, 2, 3, 0), 0)
    sizes = op.integers([op.shape[0], *full, channels])
    options = {**strides(op, window, "SAME" if same else "VALID"), "fusedActivationFunction": op.joined}
    inputs: list[TensorInFile | int] = [sizes, weight, x, op.bias(x, scales, channels)]
    if not is_cut:
        return op.emit("TRANSPOSE_CONV", inputs, x, **options)
    like = TensorInFile(-1, (op.shape[0], channels, *full), IMAGE, op.scales)
    y = op.step("TRANSPOSE_CONV", inputs, like, **options)
    return cut(op, y, (0, 0, *before))


def check_weight(op: TfliteOp, axis: int = 0) -> str:
    """Return why a layer has no integer kernel; the argument is the axis of the output channels in its weight."""
    node = op.args["weight"]
    if not op.lowering.is_dequantized(node):
        return "its weight is not quantized"
    codes, scale, along = op.lowering.codes_of(node)
    if codes.dtype != torch.int8:
        return f"its weight is {codes.dtype}"
    if scale.numel() > 1 and along != axis:
        return f"its weight has scales along axis {along}, but LiteRT supports only scales along the output channels"
    bias = op.args.get("bias")
    return "" if bias is None or op.lowering.constant(bias) is not None else "its bias is computed"


def linear(op: TfliteOp) -> TensorInFile:
    """Add a linear layer."""
    x, (out, _) = op.plain(op.value("input")), op.args["weight"].meta["val"].shape
    weight, scales = op.weight("weight", (0, 1), 0)
    options = {"fusedActivationFunction": op.joined, "keepNumDims": len(op.shape) > 2}
    like = x.moved(op.shape, range(len(op.shape)))
    return op.emit("FULLY_CONNECTED", [x, weight, op.bias(x, scales, out)], like, **options)


def matmul(op: TfliteOp) -> TensorInFile:
    """Add a matrix product."""
    a, b = (op.plain(op.value(name)) for name in ("self", "other" if "other" in op.args else "mat2"))
    return op.emit("BATCH_MATMUL", [a, b], TensorInFile(-1, op.shape, tuple(range(len(op.shape)))))
