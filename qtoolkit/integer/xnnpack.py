"""XNNPACK's integer kernels (qs8), used by ExecuTorch's delegate, op by op.

Sources are files of XNNPACK under src; the formulas were compared with executorch 1.5.1 on x86. Layers and products round like
onnxruntime's kernels; sums are computed in fixed point.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, fx

from qtoolkit.backends import backends
from qtoolkit.errors import with_article
from qtoolkit.integer.kernels import LayerKernel, OpKernel, Side, SumKernel, takes_two
from qtoolkit.integer.onnxruntime import QLinearConv, QLinearMul
from qtoolkit.nn import refusals
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import CONCATS, MOVES
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

RUNTIME = "XNNPACK"
CARRIES = (*MOVES, *CONCATS)  # behind all of them the file repeats the pair
ABSORBS = backends["xnnpack"].joined_activations


class Qs8Layer(QLinearConv):
    """Convolutions, transposed convolutions and linear layers: f32(sums + bias) * f32(f32(xs * ws) / ys), rounded to even.

    Source: qs8-qc8w-gemm and related kernels; the factors are in operators/convolution-nhwc.c.
    """

    NAME = "qs8 sums"


class Add(SumKernel):
    """(bias + a * round(ra 2^shift) + b * round(rb 2^shift)) >> shift with ra = f32(as / ys), rb = f32(bs / ys).

    The larger factor has 20 bits after its highest bit, and the bias has 2^(shift - 1): halves are rounded up. Source:
    xnn_init_qs8_add_minmax_scalar_params in microparams-init.c, and qs8-vadd.
    """

    NAME, HOW = "qs8 add", {"fixed_point": True}


class Multiply(QLinearMul):
    """f32((a - az)(b - bz)) * f32(f32(as * bs) / ys), rounded to even.

    The factor is onnxruntime's. Source: xnn_init_qs8_mul_minmax_scalar_params in microparams-init.c, and qs8-vmul.
    """

    NAME = "qs8 mul"

    def rounded(self, products: Tensor, factor: Tensor, output: Side) -> Tensor:
        return output.rounded(products, factor)


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the integer kernel of a layer, or the reason why it runs in float."""
    if layer.weight.dim() > 4:
        what = f"{with_article(layer.KIND)} with a weight of {layer.weight.dim()} dimensions"
        return Refusal(Cause.NO_KERNEL, f"XNNPACK has no integer kernel for {what}")
    return refusals.of_signed_layer(RUNTIME, layer, source, output) or Qs8Layer


def op_kernel(
    kind: str, node: fx.Node, followers: Collection[OpKind], inputs: Sequence[Grid], output: Grid | None
) -> type[OpKernel] | Refusal:
    """Return the integer kernel of an op without weights, or the reason why it runs in float."""
    if kind not in _KERNELS:
        how = f"XNNPACK computes {with_article(kind)} in float, or with an unknown order of roundings"
        return Refusal(Cause.NO_KERNEL, how)
    if not takes_two(node, inputs):
        return refusals.OTHER_ARGUMENTS
    if any(kind.clips and not kind.is_relu for kind in followers):
        return Refusal(Cause.NO_KERNEL, "XNNPACK fuses only a ReLU into it")
    return refusals.of_signed_op(RUNTIME, inputs, output) or _KERNELS[kind]


_KERNELS: Mapping[str, type[OpKernel]] = {"add": Add, "mul": Multiply}
