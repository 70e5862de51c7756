"""LiteRT's reference kernels on int8 in numpy, op by op of a file: the formulas of docs/litert.md.

Sources are files of tensorflow/lite/kernels, named at each formula; the numbers are those of the interpreter of ai-edge-litert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


# ---- fixed point (internal/quantization_util.cc, internal/common.h)


def multiplier(real: float) -> tuple[int, int]:
    """Return a factor as 31 bits and the exponent of two: QuantizeMultiplier."""
    fraction, exponent = np.frexp(real)
    bits = int(np.floor(np.float64(fraction) * 2**31 + 0.5))
    if bits == 2**31:
        bits, exponent = bits // 2, exponent + 1
    return (0, 0) if exponent < -31 else (bits, int(exponent))


def high_product(x: Array, bits: Array) -> Array:
    """Return x * bits / 2^31, halves rounded away from zero: SaturatingRoundingDoublingHighMul."""
    product = x.astype(np.int64) * bits
    nudged = product + np.where(product >= 0, 2**30, 1 - 2**30)
    return np.where(nudged >= 0, nudged // 2**31, -(-nudged // 2**31))


def divided(x: Array, exponent: Array) -> Array:
    """Return x / 2^exponent, halves rounded away from zero: RoundingDivideByPOT."""
    mask = (np.int64(1) << exponent) - 1
    threshold = (mask >> 1) + (x < 0)
    return (x >> exponent) + ((x & mask) > threshold)


def scaled(x: Array, real: Array) -> Array:
    """Return x times a factor, rounded twice: MultiplyByQuantizedMultiplier. `real` is one factor, or one for each channel."""
    pairs = [multiplier(float(value)) for value in np.atleast_1d(real)]
    bits, exponent = (np.array(part, np.int64) for part in zip(*pairs, strict=True))
    return divided(high_product(x.astype(np.int64) << np.maximum(exponent, 0), bits), np.maximum(-exponent, 0))


# ---- tensors and ops of a file


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: codes or floats, its scales and its zero point."""

    data: Array
    scales: Array
    zero: int

    @property
    def scale(self) -> float:
        return float(self.scales[0])

    @property
    def centred(self) -> Array:
        return self.data.astype(np.int64) - self.zero


@dataclass(frozen=True)
class Node:
    """An op of a file, with its tensors and its options."""

    name: str
    inputs: list[Tensor]
    output: Tensor
    options: Any

    def clamped(self, codes: Array) -> Array:
        """Return codes in the range of int8 and of the activation: CalculateActivationRangeQuantized."""
        low, high = -128, 127
        activation = getattr(self.options, "fusedActivationFunction", 0)
        if activation in (1, 3):
            low = max(low, self.code(0.0))
        if activation == 3:
            high = min(high, self.code(6.0))
        return np.clip(codes, low, high)

    def code(self, value: float) -> int:
        quotient = np.float32(value) / np.float32(self.output.scale)
        return self.output.zero + int(np.floor(np.float64(quotient) + 0.5))

    def requantized(self, sums: Array, real: Array) -> Array:
        return self.clamped(scaled(sums, real) + self.output.zero)


# ---- sums of products (reference/integer_ops/conv.h, depthwise_conv.h, fully_connected.h, transpose_conv.h)


def factors(node: Node, x: Tensor, weight: Tensor) -> Array:
    """Return input scale * weight scale / output scale in double, by channel."""
    return np.float64(x.scale) * weight.scales.astype(np.float64) / np.float64(node.output.scale)


def before_and_size(node: Node, d: int, image: int, window: int, out: int) -> int:
    """Return the padding before a dimension: ComputePaddingHeightWidth."""
    if node.options.padding == 1:  # VALID
        return 0
    stride = (node.options.strideH, node.options.strideW)[d]
    return max((out - 1) * stride + window - image, 0) // 2


def patches(node: Node, x: Array, size: tuple[int, int], fill: int = 0) -> Array:
    """Return the windows of an image (n, h, w, c) as (n, out h, out w, kernel h, kernel w, c)."""
    _, height, width, _ = node.output.data.shape
    dilation = (getattr(node.options, "dilationHFactor", 1), getattr(node.options, "dilationWFactor", 1))
    stride, found = (node.options.strideH, node.options.strideW), x
    for d, out in enumerate((height, width)):
        reach = dilation[d] * (size[d] - 1) + 1
        before = before_and_size(node, d, x.shape[1 + d], reach, out)
        behind = max((out - 1) * stride[d] + reach - x.shape[1 + d] - before, 0)
        ends = [(0, 0)] * found.ndim
        ends[1 + d * 2] = before, behind
        found = np.pad(found, ends, constant_values=fill)
        starts = np.arange(out)[:, None] * stride[d] + np.arange(size[d])[None] * dilation[d]
        found = np.take(found, starts, 1 + d * 2)
    return found.transpose(0, 1, 3, 2, 4, 5)


def conv(node: Node) -> Array:
    x, weight, bias = node.inputs
    out, kh, kw, per_group = weight.data.shape
    groups = x.data.shape[3] // per_group
    windows = patches(node, x.centred, (kh, kw))
    windows = windows.reshape(*windows.shape[:5], groups, per_group)
    kernels = weight.data.astype(np.int64).reshape(groups, out // groups, kh, kw, per_group)
    sums = np.einsum("nhwijgc,goijc->nhwgo", windows, kernels).reshape(*windows.shape[:3], out)
    return node.requantized(sums + bias.data, factors(node, x, weight))


def depthwise(node: Node) -> Array:
    x, weight, bias = node.inputs
    _, kh, kw, out = weight.data.shape
    windows = np.repeat(patches(node, x.centred, (kh, kw)), out // x.data.shape[3], 5)
    sums = np.einsum("nhwijc,ijc->nhwc", windows, weight.data[0].astype(np.int64))
    return node.requantized(sums + bias.data, factors(node, x, weight))


def fully_connected(node: Node) -> Array:
    x, weight, bias = node.inputs
    sums = x.centred.reshape(-1, weight.data.shape[1]) @ weight.data.astype(np.int64).T + bias.data
    return node.requantized(sums, factors(node, x, weight)).reshape(node.output.data.shape)


def transposed(node: Node) -> Array:
    _, weight, x, bias = node.inputs
    out, kh, kw, _ = weight.data.shape
    n, height, width, _ = node.output.data.shape
    strides = node.options.strideH, node.options.strideW
    before = [0, 0]
    if node.options.padding == 0:
        for d, (size, kernel) in enumerate(((height, kh), (width, kw))):
            before[d] = max((-(-size // strides[d]) - 1) * strides[d] + kernel - size, 0) // 2
    full = np.zeros((n, height + kh + before[0], width + kw + before[1], out), np.int64)
    products = np.einsum("nhwc,oijc->nhwijo", x.centred, weight.data.astype(np.int64))
    for i in range(kh):
        for j in range(kw):
            rows, columns = (
                slice(k, k + s * size, s) for k, s, size in zip((i, j), strides, x.data.shape[1:3], strict=True)
            )
            full[:, rows, columns] += products[:, :, :, i, j]
    sums = full[:, before[0] : before[0] + height, before[1] : before[1] + width]
    return node.requantized(sums + bias.data, factors(node, x, weight))


# ---- elementwise (add.cc, sub.cc, mul.cc, reference/integer_ops/add.h, leaky_relu.h)


def sum_of(node: Node, sign: int) -> Array:
    """Sums with 20 bits more: each operand is scaled to twice the larger scale first."""
    a, b = node.inputs
    twice = 2.0 * max(a.scale, b.scale)
    left, right = (scaled(x.centred << 20, x.scale / twice) for x in (a, b))
    return node.requantized(left + sign * right, twice / (2**20 * node.output.scale))


def product(node: Node) -> Array:
    a, b = node.inputs
    real = np.float32(a.scale) * np.float32(b.scale) / np.float32(node.output.scale)
    return node.requantized(a.centred * b.centred, real)


def leaky_relu(node: Node) -> Array:
    (x,) = node.inputs
    of_negative = np.float32(x.scale) * np.float32(node.options.alpha) / np.float32(node.output.scale)
    of_positive = np.float32(x.scale) / np.float32(node.output.scale)
    codes = np.where(x.centred >= 0, scaled(x.centred, of_positive), scaled(x.centred, of_negative))
    return node.clamped(codes + node.output.zero)


def requantize(node: Node) -> Array:
    (x,) = node.inputs
    if x.data.dtype == np.float32:
        quotient = x.data / np.float32(node.output.scale)
        rounded = np.sign(quotient) * np.floor(np.abs(quotient) + np.float32(0.5))
        return np.clip(rounded.astype(np.int64) + node.output.zero, -128, 127)
    return node.requantized(x.centred, np.float64(x.scale) / np.float64(node.output.scale))


# ---- sampling (reference/integer_ops/pooling.h, reference/resize_bilinear.h, reduce.cc)


def average_pool(node: Node) -> Array:
    """The mean of the codes in the image, halves rounded away from code zero."""
    (x,) = node.inputs
    size = node.options.filterHeight, node.options.filterWidth
    sums = patches(node, x.data.astype(np.int64), size).sum((3, 4))
    counts = patches(node, np.ones_like(x.data, np.int64), size).sum((3, 4))
    away = np.where(sums > 0, sums + counts // 2, sums - counts // 2)
    return node.clamped(np.sign(away) * (np.abs(away) // counts))


def max_pool(node: Node) -> Array:
    (x,) = node.inputs
    size = node.options.filterHeight, node.options.filterWidth
    return node.clamped(patches(node, x.data.astype(np.int64), size, -128).max((3, 4)))


def bilinear(node: Node) -> Array:
    """Positions have 10 bits behind the point, and weights too."""
    (x, _) = node.inputs
    found = x.data.astype(np.int64)
    for d in range(2):
        size, out = x.data.shape[1 + d], node.output.data.shape[1 + d]
        half = node.options.halfPixelCenters
        step = (
            (1024 * (size - 1) + (out - 1) // 2) // (out - 1)
            if node.options.alignCorners and out > 1
            else (1024 * size + out // 2) // out
        )
        places = np.arange(out) * step + (step // 2 - 512 if half else 0)
        low = np.maximum(places // 1024, 0)
        high = np.minimum(-(-places // 1024), size - 1)
        low = np.minimum(low, size - 1)
        weight = (places - 1024 * low).reshape(-1, *[1] * (2 - d))
        found = np.take(found, low, 1 + d) * (1024 - weight) + np.take(found, high, 1 + d) * weight
    away = np.where(found > 0, found + 2**19, found - 2**19)
    return np.sign(away) * (np.abs(away) // 2**20)


def mean(node: Node) -> Array:
    (x, axes) = node.inputs
    dims = tuple(int(axis) for axis in np.atleast_1d(axes.data))
    count = int(np.prod([x.data.shape[dim] for dim in dims]))
    bits, exponent = multiplier(np.float64(x.scale) / np.float64(node.output.scale))
    shift = min(int(count).bit_length() - 1, 32, 31 + exponent)
    bits, exponent = (bits << shift) // count, exponent - shift
    sums = x.centred.sum(dims, keepdims=True)
    codes = divided(high_product(sums << max(exponent, 0), np.int64(bits)), np.int64(max(-exponent, 0)))
    return node.clamped(codes + node.output.zero).reshape(node.output.data.shape)


# ---- tables (logistic, tanh, gelu: internal/common.h, LUTPopulate)


def table(function: Callable[[Array], Array]) -> Callable[[Node], Array]:
    def compute(node: Node) -> Array:
        """Compute in float32 and round halves away from zero."""
        (x,) = node.inputs
        values = function((x.centred * np.float32(x.scale)).astype(np.float32)).astype(np.float32)
        quotient = values * np.float32(1 / np.float32(node.output.scale))
        rounded = np.sign(quotient) * np.floor(np.abs(quotient) + np.float32(0.5))
        return np.clip(rounded.astype(np.int64) + node.output.zero, -128, 127)

    return compute


KERNELS: Mapping[str, Callable[[Node], Array]] = {
    "CONV_2D": conv,
    "DEPTHWISE_CONV_2D": depthwise,
    "FULLY_CONNECTED": fully_connected,
    "TRANSPOSE_CONV": transposed,
    "ADD": lambda node: sum_of(node, 1),
    "SUB": lambda node: sum_of(node, -1),
    "MUL": product,
    "LEAKY_RELU": leaky_relu,
    "QUANTIZE": requantize,
    "AVERAGE_POOL_2D": average_pool,
    "MAX_POOL_2D": max_pool,
    "RESIZE_BILINEAR": bilinear,
    "MEAN": mean,
    "LOGISTIC": table(lambda x: 1 / (1 + np.exp(-x))),
    "TANH": table(np.tanh),
}


def nodes_of(content: bytes, interpreter: Any) -> list[Node]:
    """Return the ops of a file that an interpreter has run, which keeps all tensors."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(content, 0)
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
    (graph,) = model.subgraphs
    details = {detail["index"]: detail["quantization_parameters"] for detail in interpreter.get_tensor_details()}

    def tensor(index: int) -> Tensor:
        grid = details[index]
        zeros = grid["zero_points"]
        return Tensor(interpreter.get_tensor(index), grid["scales"], int(zeros[0]) if len(zeros) else 0)

    return [
        Node(
            names[model.operatorCodes[op.opcodeIndex].builtinCode],
            [tensor(i) for i in op.inputs],
            tensor(op.outputs[0]),
            op.builtinOptions,
        )
        for op in graph.operators
    ]
