"""The values that a quantizer's grid represents."""

from torch import Tensor

from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def grid_ends(quantizer: TensorQuantizer | Grid) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of a quantizer's grid, of the scale's shape; NaN while there is no range.

    Example:
        >>> quantizer = TensorQuantizer(qt.QuantSpec(bits=4))
        >>> quantizer.amax = 7.0
        >>> grid_ends(quantizer)
        (tensor(-8.), tensor(7.))
    """
    spec, scale, zero_point = quantizer.spec, quantizer.scale, quantizer.zero_point
    shift = 0 if zero_point is None else zero_point
    return (spec.qmin - shift) * scale, (spec.qmax - shift) * scale
