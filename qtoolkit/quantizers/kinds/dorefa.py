"""Weights by tanh, activations in [0, 1] (DoReFa)."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import Shape, Shaped
from qtoolkit.quantizers.spec_ops import clip, ends_of, fake_quant, per_element, rows_of

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


class DoReFa(Shaped):
    """DoReFa (arXiv 1606.06160). Nothing is learned or observed.

    A weight (a signed spec) is r = tanh(w) / max|tanh(w)| on the 2^bits values from -1 to 1 with equal distances, where zero
    is none: y = 2 round(N (r + 1) / 2) / N - 1, N = 2^bits - 1. The maximum is taken of the tensor, or of the channel or block
    that shares a scale. Deployed, these values are the odd integers of bits + 1 bits with the step 1 / N. An activation (an
    unsigned spec) is clamped to [0, 1] and rounded to steps of 1 / N.
    """

    label = "dorefa"
    LEARNED = False
    KEEPS_SIZE = False

    def check(self, spec: QuantSpec) -> None:
        super().check(spec)
        if spec.bits > self.most_bits(spec):
            raise ValueError(
                f"QuantSpec: quantizer={spec.quantizer!r} needs bits from 2 to {self.most_bits(spec)} for a weight, whose "
                f"values without zero are integers of bits + 1 bits, got {spec.bits}; take 'lsq' for 8 bits."
            )

    def most_bits(self, spec: QuantSpec) -> int:
        """Return one less than a byte has for a weight, a signed spec."""
        return 7 if spec.signed else super().most_bits(spec)

    def check_use(self, spec: QuantSpec, name: str, of_weight: bool) -> None:
        """Raise ValueError for a signed activation or an unsigned weight."""
        if spec.signed != of_weight:
            what, other = ("a weight", "True") if of_weight else ("an activation, which it clamps to [0, 1],", "False")
            raise ValueError(
                f"quantizer {name!r}: quantizer={spec.quantizer!r} of {what} needs signed={other}, got {spec.signed}; give it "
                f"a spec of its own, or take 'lsq', in the QConfigMapping."
            )

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Keep the scale 1 / N for any range; NaN stays NaN."""
        most = (1 << quantizer.spec.bits) - 1
        fixed = torch.where(scale.isnan(), scale, torch.ones_like(scale) / most)
        super().set_grid(quantizer, fixed, zero_point)

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        return quantizer._scale, None

    def grid_spec(self, spec: QuantSpec) -> QuantSpec:
        """Return the spec of the odd integers, for a weight."""
        return (
            replace(spec, bits=spec.bits + 1, narrow=True, quantizer="fixed", quantizer_args={})
            if spec.signed
            else spec
        )

    def input_ends(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        """Return an infinite range for a weight, which tanh bounds, and [0, 1] for an activation."""
        signed = quantizer.spec.signed
        return ends_of(torch.full_like(quantizer.scale, torch.inf if signed else 1.0), signed)

    def shapes(self, spec: QuantSpec) -> bool:
        return spec.signed

    def shape(self, quantizer: "RangedQuantizer") -> Shape:
        return OddCodes(quantizer.spec, quantizer.group)

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        spec, scale = quantizer.spec, quantizer.grid()[0]
        if not spec.signed:
            return fake_quant(spec, clip(x, 0.0, 1.0), scale, None, quantizer.group, spec.block_size)
        shaped = OddCodes(spec, quantizer.group)(x)
        return fake_quant(self.grid_spec(spec), shaped, scale, None, quantizer.group, spec.block_size)


class OddCodes(Shape):
    """tanh(w) / max|tanh(w)| on the values of equal distance from -1 to 1. Differentiable."""

    def __init__(self, spec: QuantSpec, group: int) -> None:
        super().__init__()
        self.spec, self.group = spec, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the values, up to the last bit, which rounding to their grid corrects."""
        t = torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)))
        half = t / (2 * self._largest(t)) + 0.5
        most = (1 << self.spec.bits) - 1
        step = torch.full((), 1 / most, dtype=half.dtype, device=half.device)
        whole = replace(
            self.spec, signed=False, narrow=False, axis=None, group_size=None, quantizer="fixed", quantizer_args={}
        )
        return (2 * fake_quant(whole, half, step, None, 1, 0) - 1).to(x.dtype)

    def _largest(self, t: Tensor) -> Tensor:
        """Return the largest magnitudes of the elements that share a scale, shaped to broadcast; 1 where all are zero."""
        spec, group = self.spec, self.group
        count = math.prod(spec.scale_shape(t.shape, group))
        largest = per_element(rows_of(t.abs(), count, spec.axis, group, spec.block_size).amax(1), t, spec, group)
        return torch.where(largest == 0, torch.ones_like(largest), largest)
