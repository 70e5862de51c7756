"""Trained ranges: PACT, a trained minimum and maximum, and DSQ, which has the gradient of a soft staircase."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import NEEDS_ANY_SCALE, NEEDS_INTEGERS, Need
from qtoolkit.quantizers.kinds.from_start import FromStart, start_of, trained_bound
from qtoolkit.quantizers.spec_ops import straight_through, trained_by_ratio

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer

LEAST_ALPHA, LARGEST_ALPHA = 1e-3, 0.5


class Clipped(FromStart):
    """The range is trained: x is clipped to it, then rounded to the grid in it.

    The gradient of a bound is the sum of the incoming gradients of the elements beyond it. Inside the range it goes to x.
    On a symmetric grid there is one bound, alpha = scale * qmax; else the two are independent, and zero is between them. The
    parameters are ratios: of the one bound, or of the two to the width of the range, at the start.
    """

    PLAIN = False
    NEEDS: ClassVar[tuple[Need, ...]] = (NEEDS_INTEGERS, NEEDS_ANY_SCALE)

    def ratios(self, spec: QuantSpec) -> tuple[str, ...]:
        return ("_relative_bound",) if spec.symmetric else ("_relative_low", "_relative_high")

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the grid as the start, and the bounds that it has."""
        super().set_grid(quantizer, scale, zero_point)
        spec, zero = quantizer.spec, quantizer._zero_point
        if zero is None:
            return
        width = spec.qmax - spec.qmin
        for ratio, code in ((quantizer._relative_low, spec.qmin), (quantizer._relative_high, spec.qmax)):
            ratio.copy_(((code - zero) / width).reshape(ratio.shape))

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the grid of the trained range.

        The grid's own bounds lie beside the trained ones, since zero is on it: the zero point has the gradient at these.
        """
        spec = quantizer.spec
        if quantizer._zero_point is None:
            return trained_bound(quantizer) / spec.qmax, None
        low, high = self._trained_range(quantizer)
        scale = (high - low) / (spec.qmax - spec.qmin)
        zero_point = (spec.qmin - low / scale).detach().round().clamp(spec.qmin, spec.qmax)
        beside = straight_through((spec.qmin - zero_point) * scale, low)
        return scale, straight_through(zero_point, spec.qmin - beside / scale)

    def _trained_range(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        """Return an affine range: at most and at least zero, and of some width."""
        spec = quantizer.spec
        start, rate = start_of(quantizer)
        width = start * (spec.qmax - spec.qmin)
        low, high = (
            trained_by_ratio(width, ratio, rate).reshape(start.shape)
            for ratio in (quantizer._relative_low, quantizer._relative_high)
        )
        below = straight_through(low.clamp(max=0), low)
        above = straight_through(torch.maximum(high.clamp(min=0), below + width * 2**-24), high)
        return below, above

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Return x on the grid, with the gradients of its bounds."""
        spec, steepness = quantizer.spec, self.steepness(quantizer)
        scale, zero_point = quantizer.grid()
        return ops.fake_quant_clipped(
            x, scale, zero_point, spec.qmin, spec.qmax, spec.axis, quantizer.group, spec.block_size, steepness
        )

    def steepness(self, quantizer: "RangedQuantizer") -> Tensor | None:
        """Return the steepness of the soft staircase whose slope is the gradient of x; None for a slope of 1."""
        return None

    def growth(self, quantizer: "RangedQuantizer") -> Tensor | None:
        """Return the scale as a multiple of its start."""
        return (quantizer.scale / quantizer._scale).reshape(-1)


def _refuse_affine(spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"QuantSpec: quantizer={spec.quantizer!r} trains one bound: it needs symmetric=True, got False; take "
        f"'learned_range', which trains both bounds."
    )


class PACT(Clipped):
    """The bound of the range is trained (PACT, arXiv 1805.06085): y = round(clamp(x, 0, alpha) / s) s, s = alpha / qmax.

    The gradient of alpha is the sum of the incoming gradients where x is above alpha. On a signed grid the elements below
    -alpha count too. The paper starts at a large alpha and decays it like a weight: pass `scale_weight_decay` to
    `qtoolkit.parameter_groups`.
    """

    label = "pact"
    NEEDS = (*Clipped.NEEDS, Need("symmetric", True, _refuse_affine))


def _refuse_symmetric(spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"QuantSpec: quantizer={spec.quantizer!r} trains two bounds: it needs symmetric=False, got True; take 'pact', "
        f"which trains one bound."
    )


class LearnedRange(Clipped):
    """Both bounds of an affine range are trained, with the gradients of TensorFlow's fake_quant_with_min_max_vars.

    Source: arXiv 1712.05877, and tensorflow/core/kernels/fake_quant_ops_functor.h: the gradient of a bound is the sum of the
    incoming gradients of the elements beyond the grid's bound beside it.
    """

    label = "learned range"
    NEEDS = (*Clipped.NEEDS, Need("symmetric", False, _refuse_symmetric))


class DSQ(Clipped):
    """The gradient belongs to a soft staircase, whose steepness is trained with the range (DSQ, arXiv 1908.05033).

    Between two integers, at f in [0, 1] of the step, the soft staircase is (tanh(k (f - 1/2)) / (1 - alpha) + 1) / 2 with
    k = log(2 / alpha - 1): the smaller alpha, the nearer to the hard one. Forward values are the hard staircase's. The
    bounds take the gradients of the elements beyond them. Alpha starts at the option `alpha`, and stays within
    [0.001, 0.5].
    """

    label = "dsq"
    OPTIONS = {"alpha": 0.2}

    def check(self, spec: QuantSpec) -> None:
        super().check(spec)
        alpha = self.options(spec)["alpha"]
        if not isinstance(alpha, int | float) or not LEAST_ALPHA <= alpha <= LARGEST_ALPHA:
            raise ValueError(
                f"QuantSpec: alpha of quantizer={spec.quantizer!r} must lie in [{LEAST_ALPHA}, {LARGEST_ALPHA}], got {alpha!r}."
            )

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return the bounds, and alpha."""
        return {**super().parameters(spec), "_alpha": float(self.options(spec)["alpha"])}

    def steepness(self, quantizer: "RangedQuantizer") -> Tensor:
        alpha = quantizer._alpha.clamp(LEAST_ALPHA, LARGEST_ALPHA)
        return torch.log(2 / straight_through(alpha, quantizer._alpha) - 1)
