"""LiteRT's reference kernels on int8 and int16 in numpy, op by op of a file: the formulas of docs/design/litert-kernels.md.

Sources are files of tensorflow/lite/kernels, named at each formula; the numbers are those of the interpreter of ai-edge-litert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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


def scaled_once(x: Array, real: Array) -> Array:
    """Return x times a factor of 31 bits and a power of two, rounded once, halves up."""
    pairs = [multiplier(float(value)) for value in np.atleast_1d(real)]
    bits, exponent = (np.array(part, np.int64) for part in zip(*pairs, strict=True))
    shift = 31 - exponent
    return (x.astype(np.int64) * bits + (np.int64(1) << (shift - 1))) >> shift


def scaled_wide(x: Array, real: Array) -> Array:
    """Return sums of 64 bits times a factor of 15 bits, rounded once: MultiplyByQuantizedMultiplier of int64."""
    pairs = [multiplier(float(value)) for value in np.atleast_1d(real)]
    bits, exponent = (np.array(part, np.int64) for part in zip(*pairs, strict=True))
    reduced = np.where(bits < 0x7FFF0000, (bits + 2**15) >> 16, 0x7FFF)
    return (x * reduced + (np.int64(1) << (14 - exponent))) >> (15 - exponent)


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

    @property
    def is_wide(self) -> bool:
        """Whether its codes are int16."""
        return self.output.data.dtype == np.int16

    def clamped(self, codes: Array) -> Array:
        """Return codes in the range of their type and of the activation: CalculateActivationRangeQuantized."""
        limits = np.iinfo(self.output.data.dtype)
        low, high = int(limits.min), int(limits.max)
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

    def layer(self, sums: Array, bias: Tensor, real: Array) -> Array:
        """Return the codes of sums of products; biases are int64 beside int16 codes."""
        wide = bias.data.dtype == np.int64
        return self.clamped((scaled_wide if wide else scaled)(sums + bias.data, real) + self.output.zero)


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
    return node.layer(sums, bias, factors(node, x, weight))


def depthwise(node: Node) -> Array:
    x, weight, bias = node.inputs
    _, kh, kw, out = weight.data.shape
    windows = np.repeat(patches(node, x.centred, (kh, kw)), out // x.data.shape[3], 5)
    sums = np.einsum("nhwijc,ijc->nhwc", windows, weight.data[0].astype(np.int64))
    return node.layer(sums, bias, factors(node, x, weight))


def fully_connected(node: Node) -> Array:
    x, weight, bias = node.inputs
    sums = x.centred.reshape(-1, weight.data.shape[1]) @ weight.data.astype(np.int64).T + bias.data
    rounded = scaled if node.is_wide else scaled_once
    return node.clamped(rounded(sums, factors(node, x, weight)) + node.output.zero).reshape(node.output.data.shape)


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
    return node.layer(sums, bias, factors(node, x, weight))


# ---- elementwise (add.cc, sub.cc, mul.cc, reference/integer_ops/add.h, leaky_relu.h)


def sum_of(node: Node, sign: int) -> Array:
    """Sums with 20 bits more (15 of int16 codes): each operand is scaled to twice the larger scale first."""
    a, b = node.inputs
    more, twice = 15 if node.is_wide else 20, 2.0 * max(a.scale, b.scale)
    left, right = (scaled(x.centred << more, x.scale / twice) for x in (a, b))
    return node.requantized(left + sign * right, twice / (2**more * node.output.scale))


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


def absolute(node: Node) -> Array:
    """|x| times the factor of scales (elementwise.cc)."""
    (x,) = node.inputs
    return node.requantized(np.abs(x.centred), np.float32(x.scale) / np.float32(node.output.scale))


def requantize(node: Node) -> Array:
    (x,) = node.inputs
    if x.data.dtype == np.float32:
        quotient = x.data / np.float32(node.output.scale)
        rounded = np.sign(quotient) * np.floor(np.abs(quotient) + np.float32(0.5))
        return node.clamped(rounded.astype(np.int64) + node.output.zero)
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
    lowest = int(np.iinfo(x.data.dtype).min)
    return node.clamped(patches(node, x.data.astype(np.int64), size, lowest).max((3, 4)))


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


def mean_of(sums: Array, real: np.float64, count: int) -> Array:
    """sums real / count: the division is inside of the 31 bits."""
    bits, exponent = multiplier(real)
    shift = min(int(count).bit_length() - 1, 32, 31 + int(exponent))
    bits, exponent = (int(bits) << shift) // count, int(exponent) - shift
    return divided(high_product(sums << max(exponent, 0), np.int64(bits)), np.int64(max(-exponent, 0)))


def mean(node: Node) -> Array:
    (x, axes) = node.inputs
    dims = tuple(int(axis) for axis in np.atleast_1d(axes.data))
    count = int(np.prod([x.data.shape[dim] for dim in dims]))
    codes = mean_of(x.centred.sum(dims, keepdims=True), np.float64(x.scale) / np.float64(node.output.scale), count)
    return node.clamped(codes + node.output.zero).reshape(node.output.data.shape)


# ---- tables (logistic, tanh, gelu: internal/common.h, LUTPopulate)


def places_of(function: Callable[[Array], Array], low: float, high: float) -> Array:
    """Return a function at 513 places with 15 bits, less half of the error in the middle between two (LUTPopulate of int16)."""
    step = (high - low) / 512
    x = low + np.arange(513) * step
    values, middles = (away(function(at) * 32768) for at in (x, x[:-1] + step / 2))
    between = away((function(x[1:]) * 32768 + values[:-1]) / 2)
    found = np.append(values[:-1] - away((between - middles) / 2), values[-1])
    return np.clip(found, -(2**15), 2**15 - 1).astype(np.int64)


def away(x: Array) -> Array:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def looked_up(x: Array, places: Array) -> Array:
    index, offset = 256 + (x >> 7), x & 127
    return places[index] + (((places[index + 1] - places[index]) * offset + 64) >> 7)


def softmax16(node: Node) -> Array:
    """Exponentials from a table over [-10, 0], and the reciprocal of their sum from another (SoftmaxInt16)."""
    (x,) = node.inputs
    differences = x.data.astype(np.int64) - x.data.max(-1, keepdims=True)
    centred = scaled(differences, np.float64(x.scale) / (10 / 65535)) + 32767
    powers = looked_up(saturated(centred), places_of(np.exp, -10.0, 0.0))
    sums = powers.sum(-1, keepdims=True)
    zeros = 31 - np.floor(np.log2(sums)).astype(np.int64)
    shifted = ((sums << (zeros - 1)) + 2**13) >> 14
    inverse = looked_up(saturated(shifted - 2**15 - 2**16), places_of(lambda a: 1 / (1 + a), 0.0, 1.0))
    right = 31 - zeros
    return np.clip((powers * inverse + (np.int64(1) << (right - 1))) >> right, 0, 2**15 - 1)


def table(function: Callable[[Array], Array]) -> Callable[[Node], Array]:
    def compute(node: Node) -> Array:
        """Compute in float32 and round halves away from zero."""
        (x,) = node.inputs
        values = function((x.centred * np.float32(x.scale)).astype(np.float32)).astype(np.float32)
        quotient = values * np.float32(1 / np.float32(node.output.scale))
        rounded = np.sign(quotient) * np.floor(np.abs(quotient) + np.float32(0.5))
        return np.clip(rounded.astype(np.int64) + node.output.zero, -128, 127)

    return compute


def erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(x)).numpy()


def gelu(node: Node) -> Array:
    half, one = np.float32(0.5), np.float32(1)
    if node.options.approximate:
        root = np.float32(np.sqrt(2 / np.pi))
        return table(lambda x: half * x * (one + np.tanh(root * (x + np.float32(0.044715) * x * x * x))))(node)
    return table(lambda x: half * x * (one + erf(x * np.float32(np.sqrt(0.5)))))(node)


# Of exp(-2^k) with 31 bits behind the point, k from -2 to 4, and of exp(-1/8) and 1/3 (gemmlowp, fixedpoint.h).
EXPONENTIALS = {-2: 1672461947, -1: 1302514674, 0: 790015084, 1: 290630308, 2: 39332535, 3: 720401, 4: 242}
EXP_OF_EIGHTH, THIRD = 1895147668, 715827883


def exponential(a: Array) -> Array:
    """Return exp of numbers from -32 to 0 with 26 bits behind the point, with 31 bits: exp_on_negative_values."""
    behind = (a & (2**24 - 1)) - 2**24  # in [-1/4, 0)
    x = (behind << 5) + 2**28
    x2 = high_product(x, x)
    x3, x4 = high_product(x2, x), high_product(x2, x2)
    series = divided(high_product(divided(x4, np.int64(2)) + x3, THIRD) + x2, np.int64(1))
    found = EXP_OF_EIGHTH + high_product(x + series, EXP_OF_EIGHTH)
    for k, factor in EXPONENTIALS.items():
        found = np.where((behind - a) & (1 << 26 + k), high_product(found, factor), found)
    return np.where(a == 0, 2**31 - 1, found)


def reciprocal(a: Array) -> Array:
    """Return 1 / (1 + a) for a in [0, 1), both with 31 bits behind the point: one_over_one_plus_x_for_x_in_0_1."""
    half = (a + 2**31) >> 1
    x = 1515870810 + high_product(half, -1010580540)  # 48/17 - 32/17 half, with 29 bits
    for _ in range(3):
        x = x + (high_product(x, 2**29 - high_product(half, x)) << 2)
    return np.minimum(x << 1, 2**31 - 1)


def softmax(node: Node) -> Array:
    """In fixed point (reference/softmax.h): exponentials with 31 bits, their sum with 19."""
    (x,) = node.inputs
    bits, shift = multiplier(min(np.float64(x.scale) * 2**26, 2**31 - 1.0))
    least = -((31 << 26) // (1 << shift))
    differences = x.data.astype(np.int64) - x.data.max(-1, keepdims=True)
    powers = exponential(high_product(np.maximum(differences, least) << shift, bits))
    counted = differences >= least
    sums = np.where(counted, divided(powers, np.int64(12)), 0).sum(-1, keepdims=True)
    zeros = 31 - np.floor(np.log2(sums)).astype(np.int64)
    parts = high_product(powers, reciprocal((sums << zeros) - 2**31))
    return np.where(counted, node.clamped(divided(parts, 12 - zeros + 23) - 128), -128)


def multiplier16(real: float) -> tuple[int, int]:
    bits, exponent = multiplier(real)
    return min((bits + 2**15) >> 16, 2**15 - 1), exponent


def high_product16(x: Array, bits: int, rounded: bool = True) -> Array:
    product = x * bits
    return np.clip(
        (product + 2**14) >> 15 if rounded else np.sign(product) * (np.abs(product) >> 15), -(2**15), 2**15 - 1
    )


def hard_swish(node: Node) -> Array:
    """In 16 bits, with 7 of them behind the input's code (reference/hard_swish.h)."""
    (x,) = node.inputs
    fine, step = x.centred << 7, np.float32(x.scale) / np.float32(128)
    of_output, down = multiplier16(step / np.float32(node.output.scale))
    of_gate, up = multiplier16(step / np.float32(3 / 32768))
    gate = saturated(fine << max(up - 1, 0))
    gate = high_product16(gate, of_gate)
    gate = saturated(gate << 1) if up > 0 else divided(gate, np.int64(-up))
    product = high_product16((gate + 2**15) >> 1, high_product16(fine, of_output), rounded=False)
    return node.clamped(divided(product, np.int64(-down)) + node.output.zero)


def saturated(x: Array) -> Array:
    return np.clip(x, -(2**15), 2**15 - 1)


def matmul(node: Node) -> Array:
    a, b = node.inputs
    real = np.float64(a.scale) * np.float64(b.scale) / np.float64(node.output.scale)
    return node.clamped((scaled_wide if node.is_wide else scaled)(a.centred @ b.centred, real) + node.output.zero)


def relu(node: Node) -> Array:
    (x,) = node.inputs
    codes = scaled(x.centred, np.float64(x.scale) / np.float64(node.output.scale)) + node.output.zero
    return np.maximum(node.clamped(codes), node.output.zero)


# ---- what moves codes


def padding(node: Node) -> Array:
    x, ends = node.inputs[:2]
    fill = int(node.inputs[2].data[0]) if len(node.inputs) > 2 else node.output.zero
    return np.pad(x.data, ends.data, constant_values=fill)


def cut(node: Node) -> Array:
    x, begin, size = node.inputs
    return x.data[tuple(slice(a, a + n) for a, n in zip(begin.data, size.data, strict=True))]


def strided(node: Node) -> Array:
    x, begin, end, step = node.inputs
    return x.data[tuple(slice(*ends) for ends in zip(begin.data, end.data, step.data, strict=True))]


def nearest(node: Node) -> Array:
    found = node.inputs[0].data
    for axis in (1, 2):
        size, out = found.shape[axis], node.output.data.shape[axis]
        places = np.floor(np.arange(out, dtype=np.float32) * (np.float32(size) / np.float32(out)))
        found = np.take(found, np.minimum(places.astype(int), size - 1), axis)
    return found


# Kernels on int16 codes that interpolate in a table of 256 stored values, which no formula gives.
STORED_TABLES = ("LOGISTIC", "TANH")

KERNELS: Mapping[str, Callable[[Node], Array]] = {
    "CONV_2D": conv,
    "DEPTHWISE_CONV_2D": depthwise,
    "FULLY_CONNECTED": fully_connected,
    "TRANSPOSE_CONV": transposed,
    "ADD": lambda node: sum_of(node, 1),
    "SUB": lambda node: sum_of(node, -1),
    "MUL": product,
    "LEAKY_RELU": leaky_relu,
    "ABS": absolute,
    "QUANTIZE": requantize,
    "AVERAGE_POOL_2D": average_pool,
    "MAX_POOL_2D": max_pool,
    "RESIZE_BILINEAR": bilinear,
    "MEAN": mean,
    "REDUCE_MAX": lambda node: node.inputs[0].data.max(tuple(node.inputs[1].data), keepdims=True),
    "REDUCE_MIN": lambda node: node.inputs[0].data.min(tuple(node.inputs[1].data), keepdims=True),
    "LOGISTIC": table(lambda x: 1 / (1 + np.exp(-x))),
    "TANH": table(np.tanh),
    "GELU": gelu,
    "SOFTMAX": lambda node: (softmax16 if node.is_wide else softmax)(node),
    "HARD_SWISH": hard_swish,
    "BATCH_MATMUL": matmul,
    "RELU": relu,
    "PAD": padding,
    "PADV2": padding,
    "SLICE": cut,
    "STRIDED_SLICE": strided,
    "RESIZE_NEAREST_NEIGHBOR": nearest,
    "RESHAPE": lambda node: node.inputs[0].data.reshape(node.output.data.shape),
    "TRANSPOSE": lambda node: node.inputs[0].data.transpose(node.inputs[1].data),
    "CONCATENATION": lambda node: np.concatenate([x.data for x in node.inputs], node.options.axis),
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
