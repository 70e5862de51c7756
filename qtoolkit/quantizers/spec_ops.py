"""Ops of `qtoolkit.ops` with the arguments that a QuantSpec gives."""

from typing import TYPE_CHECKING

from torch import Tensor

from qtoolkit import ops

if TYPE_CHECKING:  # QuantSpec checks itself by the tables of this package
    from qtoolkit.config import QuantSpec


def fake_quant(
    spec: "QuantSpec",
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group: int,
    block_size: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """Return the values nearest to x on a spec's grid, in any of its formats."""
    channels = (spec.axis, group, block_size)
    if spec.format != "int":
        return ops.fake_quant_float(x, scale, spec.format, *channels)
    return ops.fake_quant(x, scale, zero_point, spec.qmin, spec.qmax, *channels, grad_factor)


def grid_of_range(lo: Tensor, hi: Tensor, spec: "QuantSpec") -> tuple[Tensor, Tensor | None]:
    """Return the scale, and for an affine spec the zero point, whose grid covers the range [lo, hi].

    See `qtoolkit.ops.grid_of_range`.

    Args:
        lo: Lowest values, float32, any shape.
        hi: Highest values, the same shape.
        spec: Range of codes, symmetry, powers of two.

    Returns:
        Scale and zero point, of the shape of lo. NaN or infinite ranges give scales that are not finite.

    Example:
        >>> grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), qt.QuantSpec(signed=False, symmetric=False, bits=2))
        (tensor(1.3333), tensor(1.))
    """
    return ops.grid_of_range(lo, hi, spec.qmin, spec.qmax, spec.symmetric, spec.pow2_scale)
