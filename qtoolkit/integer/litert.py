"""LiteRT's int8 reference kernels, which microcontrollers run, op by op.

They scale sums in fixed point and round twice (csrc/requantize.h). Sources are files of tensorflow/lite/kernels; every output
value was compared with ai-edge-litert 2.3. Scales xs, ws, ys are float32; the factors are products in float64.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qtoolkit.backends import backends
from qtoolkit.errors import with_article
from qtoolkit.integer.kernels import LayerKernel, OpKernel, Side, SumKernel, output_of, takes_two
from qtoolkit.integer.onnxruntime import GLOBAL_IF_ONE, QLinearMul, sums_of_means
from qtoolkit.nn import refusals
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.rules import argument, called_by
from qtoolkit.op_kinds.table import CONCATS, MEANS, MOVES
from qtoolkit.ops.requantize import (
    average_codes,
    hard_swish_codes,
    requantize_fixed_point,
    resize_linear_codes,
    softmax_codes,
)
from qtoolkit.ops.sums import exact_matmul
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

RUNTIME = "LiteRT"
Size = int | tuple[int, ...]  # of a window
CARRIES = (*MOVES, *CONCATS)
ABSORBS = backends["litert"].joined_activations


def requantized(sums: Tensor, factor: Tensor, output: Side, count: int = 1, rounded_once: bool = False) -> Tensor:
    """Return sums * factor, requantized; see `qtoolkit.ops.requantize.requantize_fixed_point`."""
    return requantize_fixed_point(sums, factor, output.scale, *output.ends, count, rounded_once)


class LitertConvolution(LayerKernel):
    """Convolutions, including depthwise and transposed: factor xs ws / ys, bias in the sums.

    Source: reference/integer_ops/conv.h, depthwise_conv.h, transpose_conv.h, and kernel_util.cc.
    """

    NAME, ROUNDS_ONCE = "sums of int8", False
    factor: Tensor

    def refresh(self) -> None:
        super().refresh()
        weight = self.layer.weight_quantizer
        if weight is not None:
            scales = self.layer.along_channels(self.input_scale.double() * weight.scale.double())
            self.constant("factor", scales / output_of(self).scale.double())

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the quantized output."""
        sums = self.sums_with_bias(x, *args, **kwargs)
        return requantized(sums, self.factor, output_of(self), rounded_once=self.ROUNDS_ONCE)


class FullyConnected(LitertConvolution):
    """Linear layers; their sums are rounded once. Source: reference/integer_ops/fully_connected.h, as measured."""

    NAME, ROUNDS_ONCE = "FULLY_CONNECTED", True


class MatMul(OpKernel):
    """A product of two activations: factor as bs / ys. Source: batch_matmul.cc."""

    NAME = "BATCH_MATMUL"

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        (a, b), output = self.inputs, output_of(self)
        factor = a.scale.double() * b.scale.double() / output.scale.double()
        return requantized(exact_matmul(a.centred(x), b.centred(other), a.ends, b.ends), factor, output)


class Multiply(QLinearMul):
    """(a - az)(b - bz) times f32(f32(as bs) / ys), onnxruntime's factor. Source: mul.cc."""

    NAME = "MUL"

    def rounded(self, products: Tensor, factor: Tensor, output: Side) -> Tensor:
        return requantized(products, factor, output)


class Add(SumKernel):
    """A sum of operands; each is first scaled to twice the larger step, with 20 more bits. Source: add.cc."""

    NAME, HOW = "ADD", {"rounded_twice": True}


class Subtract(SumKernel):
    """As Add. Source: sub.cc."""

    NAME, HOW = "SUB", {"rounded_twice": True, "subtract": True}


class LeakyReLU(OpKernel):
    """(x - xz) times f32(xs / ys), or times f32(f32(xs slope) / ys) below zero. Source: activations.cc."""

    NAME = "LEAKY_RELU"

    def compute(self, x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        (source,), output = self.inputs, output_of(self)
        slope = getattr(self.op, "negative_slope", negative_slope)
        of_sign = (source.scale * source.scale.new_tensor(factor) / output.scale for factor in (1.0, slope))
        codes = source.centred(x)
        above, below = (requantized(codes, factor, output) for factor in of_sign)
        return torch.where(codes >= 0, above, below)


class Absolute(OpKernel):
    """|x - xz| times xs / ys. Source: elementwise.cc."""

    NAME = "ABS"

    def compute(self, x: Tensor, *_: object, **__: object) -> Tensor:
        (source,), output = self.inputs, output_of(self)
        return requantized(source.centred(x).abs(), source.scale / output.scale, output)


class AveragePool(OpKernel):
    """The mean of the integers of a window, halves rounded away from 0. Source: reference/integer_ops/pooling.h."""

    NAME = "AVERAGE_POOL_2D"

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (source,), output = self.inputs, output_of(self)
        sums, counts = self._sums_and_counts(source.centred(x).double(), *args, **kwargs)
        return output.clamped(average_codes(sums + counts * source.zero_point, counts))

    def _sums_and_counts(self, codes: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the sums of windows, and their numbers of elements."""
        op = self.op
        if self.object_type in GLOBAL_IF_ONE:  # export_litert takes no windows of different sizes
            sums, count = sums_of_means(op, codes, *args, **kwargs)
            return sums, torch.full_like(sums, count)
        size, stride, padding, counts_padding = _window_of(op, *args, **kwargs)
        pool: Callable[..., Tensor] = POOLS.get(type(op), op)
        count = math.prod(size) if isinstance(size, tuple | list) else size ** (1 + [*POOLS.values()].index(pool))
        sums, inside = ((pool(each, size, stride, padding) * count).round() for each in (codes, torch.ones_like(codes)))
        return sums, torch.full_like(inside, count) if counts_padding else inside


def _window_of(
    op: Callable[..., Tensor],
    kernel_size: Size = 1,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[Size, Size | None, Size, bool]:
    """Return size, stride and padding of an average pool, a module or a function, and whether padding counts."""
    if isinstance(op, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d):
        return op.kernel_size, op.stride, op.padding, bool(op.count_include_pad)
    return kernel_size, stride, padding, count_include_pad


class Mean(OpKernel):
    """The sum times xs / ys / n; the division by n is part of the 31-bit factor. Source: reduce.cc."""

    NAME = "MEAN"

    def compute(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        (source,), output = self.inputs, output_of(self)
        sums, count = sums_of_means(self.op, source.centred(x), *args, **kwargs)
        return requantized(sums, source.scale.double() / output.scale.double(), output, count)


class LookupTable(OpKernel):
    """A function of one integer, in float32, times f32(1 / ys). Source: LUTPopulate in internal/common.h."""

    NAME = "table of 256 values"

    def compute(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        output = output_of(self)
        return output.rounded(self.op(x, *args, **kwargs), 1 / output.scale)


class Softmax(OpKernel):
    """In fixed point: 31-bit exponentials, their sum with 19 bits. Source: reference/softmax.h."""

    NAME = "SOFTMAX"
    input_step: float

    def refresh(self) -> None:
        super().refresh()
        self.input_step = float(self.inputs[0].scale)

    def compute(self, x: Tensor, dim: int = -1, *_: object, **__: object) -> Tensor:
        along = getattr(self.op, "dim", dim)
        return softmax_codes(self.inputs[0].centred(x), self.input_step, along) * output_of(self).scale


class HardSwish(OpKernel):
    """In 16 bits, with 7 fractional bits after the input's integer. Source: reference/hard_swish.h."""

    NAME = "HARD_SWISH"
    input_step: float
    output_step: float

    def refresh(self) -> None:
        super().refresh()
        self.input_step, self.output_step = float(self.inputs[0].scale), float(output_of(self).scale)

    def compute(self, x: Tensor, *_: object, **__: object) -> Tensor:
        codes, output = self.inputs[0].centred(x), output_of(self)
        return hard_swish_codes(codes, self.input_step, self.output_step, *output.ends) * output.scale


class ResizeLinear(OpKernel):
    """Positions and weights with 10 fractional bits. Source: reference/resize_bilinear.h."""

    NAME = "RESIZE_BILINEAR"

    def compute(
        self,
        x: Tensor,
        size: object = None,
        scale_factor: object = None,
        mode: str = "",
        align_corners: bool | None = None,
        *_: object,
        **__: object,
    ) -> Tensor:
        (source,), output, op = self.inputs, output_of(self), self.op
        aligned = bool(getattr(op, "align_corners", align_corners))
        given = () if isinstance(op, nn.Module) else (size, scale_factor, mode, align_corners)
        height, width = op(x, *given).shape[2:]
        return output.clamped(resize_linear_codes(source.centred(x) + source.zero_point, (height, width), aligned))


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the integer kernel of a layer, or the reason why it runs in float."""
    kernel = LitertConvolution if layer.OP_KIND.convolves else FullyConnected
    return refusals.of_signed_layer(RUNTIME, layer, source, output) or kernel


def op_kernel(
    kind: str, node: fx.Node, followers: Collection[OpKind], inputs: Sequence[Grid], output: Grid | None
) -> type[OpKernel] | Refusal:
    """Return the integer kernel of an op without weights, or the reason why it runs in float."""
    if kind not in _KERNELS:
        how = f"the reference arithmetic of {with_article(kind)} is not implemented here"
        return Refusal(Cause.NO_KERNEL, how)
    kernel = _KERNELS[kind]
    if kernel is AveragePool and called_by(node) in MEANS:
        kernel = Mean
    refusal = refusals.of_signed_op(RUNTIME, inputs, output) or _refusal_of_call(kernel, node, inputs, output)
    return refusal or kernel


def _refusal_of_call(
    kernel: type[OpKernel], node: fx.Node, inputs: Sequence[Grid], output: Grid | None
) -> Refusal | None:
    if kernel in OF_TWO:
        return None if takes_two(node, inputs) else refusals.OTHER_ARGUMENTS
    if kernel is LeakyReLU and argument(node, 1, "negative_slope", 0.01) <= 0:
        return Refusal(Cause.CALL, "its slope is not positive")
    if kernel is AveragePool and (argument(node, 4, "ceil_mode", False) or argument(node, 6, "divisor_override")):
        return Refusal(Cause.CALL, "its windows differ in size, or its divisor is not the window size")
    if kernel is ResizeLinear and argument(node, 3, "mode") != "bilinear":
        return Refusal(Cause.CALL, "its input is not an image")
    if kernel is Softmax and argument(node, 1, "dim") is None:
        return Refusal(Cause.CALL, "it has no dimension argument")
    return _refusal_of_steps(kernel, Side.of(inputs[0]), None if output is None else Side.of(output))


def _refusal_of_steps(kernel: type[OpKernel], source: Side, output: Side | None) -> Refusal | None:
    """Return why a kernel with its own fixed-point format does not support these steps, as determined by its op."""
    if output is None:
        return None
    code, step, of_output = torch.zeros(1), float(source.scale), float(output.scale)
    try:
        if kernel is Softmax:
            softmax_codes(code, step, 0)
        elif kernel is HardSwish:
            hard_swish_codes(code, step, of_output, *output.ends)
    except ValueError:
        return NO_STEPS
    return NO_STEPS if kernel is Softmax and (of_output, output.ends) != (1 / 256, (0, 255)) else None


NO_STEPS = Refusal(Cause.OUTPUT_CODES, "LiteRT's fixed-point kernel does not support its scales")
POOLS: Mapping[object, Callable[..., Tensor]] = {
    nn.AvgPool1d: F.avg_pool1d,
    nn.AvgPool2d: F.avg_pool2d,
    nn.AvgPool3d: F.avg_pool3d,
}
OF_TWO = (Add, Subtract, Multiply, MatMul)
_KERNELS: Mapping[str, type[OpKernel]] = {
    "add": Add,
    "sub": Subtract,
    "mul": Multiply,
    "matmul": MatMul,
    "leaky_relu": LeakyReLU,
    "abs": Absolute,
    "avg_pool": AveragePool,
    "mean": Mean,
    "softmax": Softmax,
    "hardswish": HardSwish,
    "upsample_linear": ResizeLinear,
    **dict.fromkeys(("sigmoid", "tanh", "gelu"), LookupTable),
}
