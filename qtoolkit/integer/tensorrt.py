"""TensorRT's integer kernels as documented by NVIDIA ("Working with Quantized Types"): int8, round half to even.

Sums are int32, and are multiplied by the scales in float32. Biases, activations, residual adds and the division by the output's
scale are float32; rounding to float16 in float16 files is not simulated. The documentation does not give the order of these
operations, and TensorRT chooses kernels by their speed: results may differ by one step at rounding ties.
"""

from qtoolkit.integer.kernels import FloatOutput, LayerKernel
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.table import CONCATS, MOVES
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

# Its documentation does not say that any of these are computed in integers.
NOT_ON_CODES = ("split", "stack", "upsample_nearest", "pixel_shuffle", "zero_pad", "edge_pad")
CARRIES = tuple(kind for kind in (*MOVES, *CONCATS) if kind not in NOT_ON_CODES)


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the integer kernel of a layer, or the reason why TensorRT computes it in float."""
    if source.zero_point is not None:
        return Refusal(Cause.INPUT_CODES, "TensorRT supports only inputs with zero point 0")
    return FloatOutput
