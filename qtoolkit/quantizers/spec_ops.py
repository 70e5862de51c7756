"""Ops of `qtoolkit.ops` with the arguments that a QuantSpec gives."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtoolkit import ops

if TYPE_CHECKING:  # QuantSpec checks itself by the tables of this package
    from qtoolkit.config import QuantSpec

# The largest number of each small float format of `qtoolkit.ops.fake_quant_float`.
LARGEST = {"e4m3": 448, "e5m2": 57344, "e2m1": 6}


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
    if torch.compiler.is_compiling() and grad_factor != 1.0:  # the op's own would be a constant: a graph for each size
        scale = _WithFactor.apply(scale, grad_factor)
        zero_point = None if zero_point is None else _WithFactor.apply(zero_point, grad_factor)
        grad_factor = 1.0
    return ops.fake_quant(x, scale, zero_point, spec.qmin, spec.qmax, *channels, grad_factor)


class _WithFactor(torch.autograd.Function):
    """Return x; its gradient is multiplied by a factor, which may depend on a dynamic size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


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
