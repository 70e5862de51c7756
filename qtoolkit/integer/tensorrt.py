"""TensorRT's integer kernels as NVIDIA documents them ("Working with Quantized Types"): int8 codes, round half to even.

Sums are int32, and are multiplied by the scales in float32; biases, activations, residual adds and the division by the
output's scale are float32, or rounded to float16 in a file of that type, which is not done here. The documentation does not
give the order of these operations, which depends on the kernel that TensorRT chooses by its speed: codes may differ by one at
rounding ties.
"""

from qtoolkit.integer.kernels import FloatOutput, LayerKernel
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.table import CONCATS, MOVES
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.verdicts import Cause, Refusal

# Its documentation says of none of these that it computes them on codes.
NOT_ON_CODES = ("split", "stack", "upsample_nearest", "pixel_shuffle", "zero_pad", "edge_pad")
CARRIES = tuple(kind for kind in (*MOVES, *CONCATS) if kind not in NOT_ON_CODES)


def layer_kernel(layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
    """Return the kernel of a layer with sums of codes, or why TensorRT computes it in float."""
    if source.zero_point is not None:
        return Refusal(Cause.INPUT_CODES, "TensorRT takes no input with a zero point other than 0")
    return FloatOutput
