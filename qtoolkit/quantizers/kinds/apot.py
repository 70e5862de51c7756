"""Sums of powers of two (APoT)."""

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import Shape, Shaped
from qtoolkit.quantizers.kinds.from_start import FromStart, trained_bound
from qtoolkit.quantizers.spec_ops import ends_of

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer

# The terms of a level for each number of bits of the magnitude, of which one of each group, or none, is added; in units of
# the least level. Two bits are one group, and each group of a power takes the powers of two in turns (section 2.2).
TERMS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,),),
    2: ((4, 2, 1),),
    3: ((8, 4, 1), (2,)),
    4: ((32, 8, 2), (16, 4, 1)),
    5: ((64, 16, 2), (32, 8, 1), (4,)),
}


# The levels of a magnitude of some bits, in units of the least one, in order.
LEVELS = {
    bits: tuple(sorted({sum(terms) for terms in product(*((0, *group) for group in groups))}))
    for bits, groups in TERMS.items()
}


def magnitude_bits(spec: QuantSpec) -> int:
    """Return the bits of a magnitude: all but the sign."""
    return spec.bits - int(spec.signed)


class APoT(FromStart, Shaped):
    """Levels are sums of powers of two, clipped at a trained alpha (APoT, arXiv 1909.13144): y = alpha Q(x / alpha).

    Levels are dense near zero. The gradient of alpha is Q(x / alpha) - x / alpha inside the range, and the sign of x outside.
    The levels are as in the authors' code; alpha starts at the observed range's bound. Weights are not normalized first,
    as in the paper: their alpha follows their own size, so batch norms still fold. Levels are whole multiples of the least
    one, so a weight is deployed with integers of at most 8 bits.
    """

    label = "apot"
    RATIOS = ("_relative_bound",)

    def check(self, spec: QuantSpec) -> None:
        super().check(spec)
        if spec.bits > self.most_bits(spec):
            raise ValueError(
                f"QuantSpec: quantizer={spec.quantizer!r} needs bits from 2 to {self.most_bits(spec)} with "
                f"signed={spec.signed}, whose levels fit in a byte, got {spec.bits}; take 'lsq' for more bits."
            )

    def most_bits(self, spec: QuantSpec) -> int:
        """Return the bits of the most levels, and one for the sign."""
        return max(TERMS) + int(spec.signed)

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the least level above zero, of which the others are multiples."""
        return trained_bound(quantizer) / LEVELS[magnitude_bits(quantizer.spec)][-1], None

    def grid_spec(self, spec: QuantSpec) -> QuantSpec:
        """Return the spec of the integers, the multiples of the least level."""
        bits = LEVELS[magnitude_bits(spec)][-1].bit_length() + int(spec.signed)
        return replace(spec, bits=max(bits, 2), narrow=spec.signed, quantizer="fixed", quantizer_args={})

    def input_ends(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        return ends_of(trained_bound(quantizer).detach(), quantizer.spec.signed)

    def shape(self, quantizer: "RangedQuantizer") -> Shape:
        return Levels(quantizer.spec, quantizer.group, quantizer.scale.clone())

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        return nearest_level(x, quantizer.spec, quantizer.grid()[0], quantizer.group)


def nearest_level(x: Tensor, spec: QuantSpec, scale: Tensor, group: int) -> Tensor:
    """Return the level nearest to x in units of a scale, times the scale. Differentiable.

    Example:
        >>> spec = qt.QuantSpec(bits=4, quantizer="apot")
        >>> nearest_level(torch.tensor([0.9, -4.8, 5.1, 99.0]), spec, torch.tensor(1.0), 1)
        tensor([ 1., -4.,  6., 10.])
    """
    levels = LEVELS[magnitude_bits(spec)]
    return ops.fake_quant_levels(x, scale, levels, spec.signed, spec.axis, group, spec.block_size)


class Levels(Shape):
    """Rounds to levels, which lie on a uniform grid."""

    why_no_export = "its levels are not uniform, and QuantizeLinear rounds to uniform ones; take 'lsq' for activations"

    def __init__(self, spec: QuantSpec, group: int, scale: Tensor) -> None:
        super().__init__()
        self.spec, self.group = spec, group
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nearest_level(x, self.spec, self.get_buffer("scale"), self.group)
