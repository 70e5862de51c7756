"""OpenVINO's integer kernels on the CPU: integer sums, then float32.

Sources: the rules of its low-precision transformations (docs: low-precision-transformations, quantization-scheme) and oneDNN's
int8 convolution (cpu/x64/jit_avx512_core_x8s8s32x_conv_kernel.cpp): the int32 sums become float32, are multiplied by one scale
per output channel, and the float bias is added. Activations and the following ops are float32 operations of the same kernel, so
they round like in the float form.
"""

import torch
from torch import Tensor

from qtoolkit.integer.kernels import FloatOutput, LayerKernel, output_of
from qtoolkit.nn import refusals
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.table import CONCATS, MOVES
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

# For outputs of these ops, the formulas here were not compared with OpenVINO.
NOT_COMPARED = ("split", "stack", "upsample_nearest", "pixel_shuffle", "edge_pad")
CARRIES = tuple(kind for kind in (*MOVES, *CONCATS) if kind not in NOT_COMPARED)


class MultipliedSums(FloatOutput):
    """f32(f32(f32(sums) * f32(xs * ws)) + bias); later ops are float32. xs is the input's range / its number of steps.

    In a comparison for each kind of layer, no value after a ReLU differs. A few in a million differ, at ties, after a linear
    layer without a ReLU, and after a convolution without a bias, where the output's scale is part of the factor.
    """

    @property
    def input_scale(self) -> Tensor:
        """The step of the input, from its range."""
        (source,) = self.inputs
        low, high = source.ends
        return (high * source.scale - low * source.scale) / torch.full_like(source.scale, high - low)


class QuantizedSums(MultipliedSums):
    """rint(fma(y, f, z)) for y of `MultipliedSums`, f = f32(255 / f32(high - low)), z = f32(f32(-low * 255) / f32(high - low)).

    [low, high] is the output's range, of 255 steps. Sources: its CPU plugin, FakeQuantize::getOptimizedFormula, and oneDNN's
    eltwise_linear, which is a fused multiply-add. Of 50 million values of 1x1 convolutions, none differs.
    """

    TO_FLOAT = False
    factor: Tensor
    shift: Tensor

    def refresh(self) -> None:
        super().refresh()
        output = output_of(self)
        low, high = (end * output.scale for end in output.ends)
        steps = torch.full_like(low, output.ends[1] - output.ends[0])
        self.constant("factor", (steps / (high - low)).double())
        self.constant("shift", (-low * steps / (high - low)).double())

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the quantized output."""
        output = output_of(self)
        y = super().forward(x, *args, **kwargs)
        return output.rounded(y, self.factor, self.shift, zero_code=-output.ends[0], fused=True)


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the integer kernel of a layer, or the reason why OpenVINO computes it in float."""
    kind = layer.OP_KIND
    if kind.transposed and source.zero_point is not None:
        only = "OpenVINO computes a conv_transpose in integers only if the zero point is 0"
        return Refusal(Cause.INPUT_CODES, only)
    fused = kind.convolves and layer.bias is not None and refusals.of_output(output) is None
    return QuantizedSums if fused else MultipliedSums
