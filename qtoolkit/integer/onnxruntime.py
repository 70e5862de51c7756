"""onnxruntime's integer kernels on the CPU, at its default optimization level, op by op.

Each formula is in float32, in the order of the kernel's instructions; other orders give other results at rounding ties. Sources
are files of onnxruntime 1.30 under onnxruntime/core; the formulas were compared with the library on millions of values. In the
formulas, xs, ws, ys are scales of input, weight and output, xz and yz zero points, and f32(...) rounds to float32.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from qtoolkit.backends import backends
from qtoolkit.errors import with_article
from qtoolkit.integer.kernels import LayerKernel, OpKernel, Side, SumKernel, output_of, takes_two
from qtoolkit.integer.sub_pixel import sub_pixels_of_image
from qtoolkit.nn import refusals
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.rules import argument, called_by
from qtoolkit.op_kinds.table import CONCATS, MEANS, MOVES
from qtoolkit.ops.sums import exact_matmul
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal


class QLinearConv(LayerKernel):
    """QLinearConv, and QGemm with a quantized output: factor f32(f32(xs * ws) / ys), bias in the sums.

    The result is rint(clip(f32(f32(sums) * factor), qmin - yz, qmax - yz)) + yz, as for all kernels here with a factor. Source:
    providers/cpu/quantization/qlinearconv.cc, mlas/lib/requantize.cpp.
    """

    NAME = "QLinearConv"
    factor: Tensor

    def refresh(self) -> None:
        super().refresh()
        self.constant("factor", self.steps / output_of(self).scale)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the quantized output."""
        return output_of(self).rounded(self.sums_with_bias(x, *args, **kwargs), self.factor)


class QGemm(QLinearConv):
    """QGemm with a quantized output. Source: contrib_ops/cpu/quantization/quant_gemm.cc."""

    NAME = "QGemm"


class QGemmToFloat(LayerKernel):
    """QGemm without a quantized output: f32(f32(sums + bias) * f32(xs * ws)).

    Source: contrib_ops/cpu/quantization/quant_gemm.cc.
    """

    NAME, TO_FLOAT = "QGemm", True

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the output in float."""
        return self.sums_with_bias(x, *args, **kwargs).float() * self.steps


class QLinearAdd(SumKernel):
    """QLinearAdd: rint(fma(a, ra, fma(b, rb, yz - fma(ra, az, f32(rb * bz))))) with ra = f32(as / ys), rb = f32(bs / ys).

    Source: mlas/lib/intrinsics/avx2/qladd_avx2.cpp. Integers are unsigned: on x86, int8 becomes uint8 by adding 128
    (optimizer/qdq_transformer/qdq_s8_to_u8.cc).
    """

    NAME, AS_UNSIGNED = "QLinearAdd", True


class QLinearMul(OpKernel):
    """QLinearMul: rint(f32(f32((a - az)(b - bz) * r) + yz)) with r = f32(f32(as * bs) / ys). Source: mlas/lib/qlmul.cpp."""

    NAME = "QLinearMul"

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        (a, b), output = self.inputs, output_of(self)
        return self.rounded(a.centred(x) * b.centred(other), a.scale * b.scale / output.scale, output)

    def rounded(self, products: Tensor, factor: Tensor, output: Side) -> Tensor:
        """Return integer products times the factor, rounded to the output's grid like in the kernel."""
        return output.rounded(products, factor, zero_code=output.unsigned_zero_point)


class QLinearMatMulOfTwo(OpKernel):
    """QLinearMatMul of two activations, factor f32(f32(as * bs) / ys); without a quantized output MatMulIntegerToFloat."""

    NAME = "QLinearMatMul"

    def compute(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the quantized output, or the float output."""
        (a, b), output = self.inputs, self.output
        sums, factor = exact_matmul(a.centred(x), b.centred(other), a.ends, b.ends), a.scale * b.scale
        return sums.float() * factor if output is None else output.rounded(sums, factor / output.scale)


class QLinearGlobalAveragePool(OpKernel):
    """QLinearGlobalAveragePool: the integer sum, requantized by f32(xs / f32(ys * n)) for n values.

    Source: mlas/lib/qlgavgpool.cpp.
    """

    NAME = "QLinearGlobalAveragePool"

    def compute(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        (source,), output = self.inputs, output_of(self)
        sums, count = sums_of_means(self.op, source.centred(x), *args, **kwargs)
        return output.rounded(sums, source.scale / (output.scale * count))


def global_pool_takes(source: float, output: float) -> bool:
    """Return whether QLinearGlobalAveragePool takes the scales of its input and its output, for images of any size.

    It raises an error unless 2^-32 <= xs / (ys * n) < 256, for n of at most 2^24. Source: mlas/lib/qlgavgpool.cpp.
    """
    return 2.0**-8 <= source / output < 2.0**8


def sums_of_means(mean: Callable[..., Tensor], codes: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, int]:
    """Return the integer sums of an op that computes means, in float64, and the number of values in each."""
    means = mean(codes.double(), *args, **kwargs)
    count = codes.numel() // max(means.numel(), 1)
    return (means * count).round(), count


class QLinearAveragePool(OpKernel):
    """QLinearAveragePool: the mean in float32, in the order of the window, then rint(f32(f32(mean / ys) + yz)).

    Source: contrib_ops/cpu/quantization/qlinear_pool.cc.
    """

    NAME = "QLinearAveragePool"

    def compute(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        output = output_of(self)
        return output.rounded(self.op(x, *args, **kwargs), None, zero_code=output.unsigned_zero_point)


# ---- which op has which kernel

CARRIES = (*MOVES, *CONCATS)  # the file repeats the pair behind these (Backend.repeated_pairs)
# ONNX ops past which onnxruntime itself moves a DequantizeLinear forward, and a QuantizeLinear that is the only user backward.
# Optimizer: core/optimizer/qdq_transformer/qdq_propagation.cc.
PAIRS_MOVE_PAST = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
ABSORBS = backends["onnxruntime"].joined_activations
# Kernels by lookup table: QLinearLeakyRelu, QLinearSigmoid and QLinearSoftmax. (Kernels that only move data need none.)
TABLES = ("leaky_relu", "sigmoid", "softmax")
OTHER_SCALES = Refusal(Cause.NO_KERNEL, "onnxruntime's global pool does not take scales that differ so much")
OTHER_TYPE = Refusal(Cause.OUTPUT_CODES, "its input and its output have different integer types")


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the integer kernel of a layer, or the reason why onnxruntime computes it in float.

    Source: core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc.
    """
    kind, weight = layer.OP_KIND, layer.weight_quantizer
    if kind.transposed and not _has_sub_pixel_form(layer):
        return _no_kernel("onnxruntime has no integer kernel for a conv_transpose that has no sub-pixel form")
    if weight is not None and source.spec.qmin < 0 <= weight.spec.qmin:
        return Refusal(Cause.WEIGHT_CODES, "its weight is unsigned but its input is signed")
    refusal = _refusal_of_output([source], output)
    if kind.convolves:
        return refusal or QLinearConv
    return QGemm if refusal is None else QGemmToFloat


def _no_kernel(text: str) -> Refusal:
    return Refusal(Cause.NO_KERNEL, text)


def _refusal_of_output(inputs: Sequence[Grid], output: Grid | None) -> Refusal | None:
    signed = {grid.spec.signed for grid in (*inputs, output) if grid is not None}
    return refusals.of_output(output) or (OTHER_TYPE if len(signed) > 1 else None)


def _has_sub_pixel_form(layer: Any) -> bool:
    """Return whether the file has a convolution in place of a transposed one (`qtoolkit.export.passes.sub_pixel`)."""
    cuts = [(cut, cut) for cut in layer.padding]
    sizes, of_output = layer.kernel_size, layer.output_padding
    return sub_pixels_of_image(sizes, layer.stride, cuts, of_output, layer.dilation) is not None


def op_kernel(
    kind: str, node: fx.Node, followers: Collection[OpKind], inputs: Sequence[Grid], output: Grid | None
) -> type[OpKernel] | Refusal:
    """Return the integer kernel of an op without weights, or the reason why onnxruntime computes it in float."""
    if kind in TABLES:
        return _no_kernel("the runtime's kernel is a lookup table of the float op")
    if kind not in _KERNELS:
        return _no_kernel(f"onnxruntime computes {with_article(kind)} on dequantized values")
    kernel, refusal = _KERNELS[kind], refusals.of_inputs(*(grid.capability_now for grid in inputs))
    if output is not None or kernel is not QLinearMatMulOfTwo:
        refusal = refusal or _refusal_of_output(inputs, output)
    if refusal is not None:
        return refusal
    if kernel is QLinearAveragePool:
        found = _average_pool(node)
        takes = output is None or global_pool_takes(float(inputs[0].scale), float(output.scale))
        return OTHER_SCALES if found is QLinearGlobalAveragePool and not takes else found
    return kernel if takes_two(node, inputs) else refusals.OTHER_ARGUMENTS


def _average_pool(node: fx.Node) -> type[OpKernel] | Refusal:
    op = called_by(node)
    if op in GLOBAL_IF_ONE:
        sizes = argument(node, 1, "output_size")
        is_one = {1} == set(sizes) if isinstance(sizes, tuple | list) else sizes == 1
        return QLinearGlobalAveragePool if is_one else _no_kernel("its windows differ in size")
    if op in MEANS:
        return QLinearGlobalAveragePool
    if argument(node, 6, "divisor_override"):
        return _no_kernel("its divisor is not the size of its window")
    plain = op in (nn.AvgPool2d, F.avg_pool2d)
    return QLinearAveragePool if plain else _no_kernel("onnxruntime has an integer kernel only for two dimensions")


_KERNELS: Mapping[str, type[OpKernel]] = {
    "add": QLinearAdd,
    "mul": QLinearMul,
    "matmul": QLinearMatMulOfTwo,
    "avg_pool": QLinearAveragePool,
}
GLOBAL_IF_ONE = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
)
