"""LiteRT's reference kernels on int8, which microcontrollers run, operation by operation.

They scale sums in fixed point and round twice (csrc/requantize.h). Sources are files of tensorflow/lite/kernels, read and then
compared with ai-edge-litert 2.3 code by code. Scales xs, ws, ys are float32; the factors are products in float64.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qtoolkit.backends import backends
from qtoolkit.errors import with_article
from qtoolkit.integer.kernels import LayerKernel, OpKernel, output_of
from qtoolkit.integer.onnxruntime import GLOBAL_IF_ONE, MEANS
from qtoolkit.nn import refusals
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.rules import argument, module_of
from qtoolkit.op_kinds.table import CONCATS, MOVES
from qtoolkit.ops.requantize import add_codes, requantize_fixed_point
from qtoolkit.ops.sums import exact_matmul
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

CARRIES = (*MOVES, *CONCATS)
ABSORBS = backends["litert"].joined_activations


class Layer(LayerKernel):
    """Convolutions, depthwise and transposed ones too, and linear layers: factor xs ws / ys, bias in the sums.

    Source: reference/integer_ops/conv.h, depthwise_conv.h, transpose_conv.h, fully_connected.h, and kernel_util.cc.
    """

    NAME = "sums of int8"
    factor: Tensor

    def refresh(self) -> None:
        """Compute the factors."""
        super().refresh()
        weight = self.layer.weight_quantizer
        if weight is not None:
            scales = self.layer.along_channels(self.input_scale.double() * weight.scale.double())
            self.constant("factor", scales / output_of(self).scale.double())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the values of the output's codes."""
        output = output_of(self)
        return requantize_fixed_point(self.sums_with_bias(x, *args, **kwargs), self.factor, output.scale, *output.ends)


class _ByFactor(OpKernel):
    """An op whose result is a number of integers times one factor."""

    def _real(self) -> Tensor:
        """Return the factor, 0-d float64."""
        raise NotImplementedError

    def _scaled(self, sums: Tensor, factor: Tensor | None = None) -> Tensor:
        output = output_of(self)
        return requantize_fixed_point(sums, self._real() if factor is None else factor, output.scale, *output.ends)


class MatMul(_ByFactor):
    """A product of two activations: factor xs ys / zs. Source: batch_matmul.cc."""

    NAME = "BATCH_MATMUL"

    def _real(self) -> Tensor:
        a, b = self.inputs
        return a.scale.double() * b.scale.double() / output_of(self).scale.double()

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the values of the output's codes."""
        a, b = self.inputs
        return self._scaled(exact_matmul(a.centred(x), b.centred(other), a.ends, b.ends))


class Multiply(_ByFactor):
    """(a - az)(b - bz) times f32(f32(as bs) / ys). Source: mul.cc."""

    NAME = "MUL"

    def _real(self) -> Tensor:
        a, b = self.inputs
        return (a.scale * b.scale / output_of(self).scale).double()

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the values of the codes of x * other."""
        a, b = self.inputs
        return self._scaled(a.centred(x) * b.centred(other))


class Add(OpKernel):
    """A sum of operands that are scaled to twice the larger step first, with 20 bits more. Source: add.cc."""

    NAME, SUBTRACTS = "ADD", False

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the values of the codes of the sum, or of the difference."""
        (a, b), y = self.inputs, output_of(self)
        of_x, of_other = ((side.scale, side.zero_point) for side in (a, b))
        grids = (*of_x, other, *of_other, y.scale, y.zero_point, *y.ends)
        return add_codes(x, *grids, rounded_twice=True, subtract=self.SUBTRACTS)


class Subtract(Add):
    """As Add. Source: sub.cc."""

    NAME, SUBTRACTS = "SUB", True


class LeakyReLU(_ByFactor):
    """(x - xz) times f32(xs / ys), or times f32(f32(xs slope) / ys) below zero. Source: activations.cc."""

    NAME = "LEAKY_RELU"

    def _real(self) -> Tensor:
        return (self.inputs[0].scale / output_of(self).scale).double()

    def compute(self, x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        """Return the values of the output's codes."""
        (source,) = self.inputs
        slope = torch.tensor(getattr(self._op[0], "negative_slope", negative_slope), dtype=torch.float32)
        below = (source.scale * slope.to(x.device) / output_of(self).scale).double()
        codes = source.centred(x)
        return torch.where(codes >= 0, self._scaled(codes), self._scaled(codes, below))


class AveragePool(OpKernel):
    """The mean of the codes of a window, halves rounded away from code zero. Source: reference/integer_ops/pooling.h."""

    NAME = "AVERAGE_POOL_2D"

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the values of the means' codes."""
        (source,), output = self.inputs, output_of(self)
        means = self._op[0](source.centred(x).double(), *args, **kwargs)
        count = self._count(x, means, *args, **kwargs)
        sums = (means * count).round() + count * source.zero_point
        codes = sums.sign() * torch.floor((sums.abs() + count // 2) / count) - output.zero_point
        values: Tensor = codes.clamp(*output.ends) * output.scale.double()
        return values.float()

    def _count(self, x: Tensor, means: Tensor, kernel_size: Any = None, *_: Any, **__: Any) -> int:
        """Return the number of elements of a window."""
        op = self._op[0]
        if type(op) in GLOBAL_IF_ONE or op in GLOBAL_IF_ONE:  # export_litert takes no windows of different sizes
            return math.prod(x.shape[2:]) // math.prod(means.shape[2:])
        size = getattr(op, "kernel_size", kernel_size)
        return math.prod(size) if isinstance(size, tuple | list) else size ** (x.dim() - 2)


class Mean(OpKernel):
    """The sum times xs / ys / n, whose division by n is inside of the 31 bits. Source: reduce.cc."""

    NAME = "MEAN"

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the values of the means' codes."""
        (source,), output = self.inputs, output_of(self)
        means = self._op[0](source.centred(x).double(), *args, **kwargs)
        count = x.numel() // means.numel()
        fraction, exponent = math.frexp(float(source.scale) / float(output.scale))
        bits = math.floor(fraction * 2**31 + 0.5)
        if bits == 2**31:
            bits, exponent = bits // 2, exponent + 1
        shift = min(count.bit_length() - 1, 32, 31 + exponent)
        factor = math.ldexp((bits << shift) // count, exponent - shift - 31)
        scaled = torch.tensor(factor, dtype=torch.float64, device=x.device)
        return requantize_fixed_point((means * count).round(), scaled, output.scale, *output.ends, exponent - shift)


class Table(OpKernel):
    """A function of one code, in float32, times f32(1 / ys). Source: LUTPopulate in internal/common.h."""

    NAME = "table of 256 codes"

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the values of the output's codes."""
        output = output_of(self)
        return output.rounded(self._op[0](x, *args, **kwargs), 1 / output.scale)


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the kernel of a layer with sums of codes, or why it runs in float."""
    return _unsigned(Cause.INPUT_CODES, source) or _refusal_of_output(output) or Layer


def _unsigned(cause: Cause, *grids: Grid | None) -> Refusal | None:
    signed = all(grid is None or grid.spec.signed for grid in grids)
    return None if signed else Refusal(cause, "LiteRT has no unsigned codes")


def _refusal_of_output(output: Grid | None) -> Refusal | None:
    return refusals.of_output(output) or _unsigned(Cause.OUTPUT_CODES, output)


def op_kernel(
    kind: str, node: fx.Node, followers: Collection[OpKind], inputs: Sequence[Grid], output: Grid | None
) -> type[OpKernel] | Refusal:
    """Return the kernel of an op without weights, or why it runs in float."""
    if kind not in _KERNELS:
        how = f"no kernel here has the reference arithmetic of {with_article(kind)}"
        return Refusal(Cause.NO_KERNEL, how)
    refusal = refusals.of_inputs(*(grid.capability_now for grid in inputs)) or _unsigned(Cause.INPUT_CODES, *inputs)
    kernel = _KERNELS[kind]
    if kernel is AveragePool and _callable(node) in MEANS:
        kernel = Mean
    return refusal or _refusal_of_output(output) or _refusal_of_call(kernel, node, inputs) or kernel


def _refusal_of_call(kernel: type[OpKernel], node: fx.Node, inputs: Sequence[Grid]) -> Refusal | None:
    if kernel in OF_TWO:
        return refusals.OTHER_ARGUMENTS if len(inputs) != 2 or len(node.args) != 2 or node.kwargs else None
    if kernel is LeakyReLU and argument(node, 1, "negative_slope", 0.01) <= 0:
        return Refusal(Cause.CALL, "its slope is not positive")
    if kernel is AveragePool and _callable(node) not in GLOBAL_IF_ONE:
        padded = argument(node, 3, "padding", 0) not in (0, (0, 0), [0, 0])
        if argument(node, 4, "ceil_mode", False) or (padded and not argument(node, 5, "count_include_pad", True)):
            return Refusal(Cause.CALL, "its windows differ in size")
    return None


def _callable(node: fx.Node) -> Any:
    return type(module_of(node)) if node.op == "call_module" else node.target


OF_TWO = (Add, Subtract, Multiply, MatMul)
_KERNELS: Mapping[str, type[OpKernel]] = {
    "add": Add,
    "sub": Subtract,
    "mul": Multiply,
    "matmul": MatMul,
    "leaky_relu": LeakyReLU,
    "avg_pool": AveragePool,
    "mean": Mean,
    **dict.fromkeys(("sigmoid", "tanh", "gelu"), Table),
}
