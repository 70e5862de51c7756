"""A trained scale (LSQ), and one with a trained offset (LSQ+)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import NEEDS_ANY_SCALE, NEEDS_INTEGERS, Need
from qtoolkit.quantizers.kinds.from_start import FromStart, start_of
from qtoolkit.quantizers.spec_ops import lsq_start, straight_through, trained_by_ratio

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


class LSQ(FromStart):
    """The scale is trained (LSQ, arXiv 1902.08153).

    It starts at the least squared error where the spec's observer is the default, "minmax"; with "lsq" as in the paper, at
    2 mean|v| / sqrt(qmax); with another observer from its range. The parameter is the ratio of the scale to its start, so the
    scale stays positive. The paper's factor of the gradient, 1 / sqrt(N qmax), suits a scale of the paper's size: wherever it
    starts, the scale is a constant times the paper's start of the weight that is trained, or of an activation of the size
    that batch norms give, and SGD trains it as if that were the parameter (see `FromStart`).
    """

    label = "lsq"
    NEEDS: ClassVar[tuple[Need, ...]] = (NEEDS_INTEGERS, NEEDS_ANY_SCALE)
    RATIOS = ("_relative_scale",)

    def kept_rate(self, quantizer: "RangedQuantizer", before: Tensor) -> Tensor:
        """Return the rate with the same base."""
        return super().kept_rate(quantizer, before) * (quantizer._scale / before).square()

    def weight_rate(self, quantizer: "RangedQuantizer", quantized: Tensor, trained: Tensor, sharing: int) -> Tensor:
        """Return the rate whose base is the paper's scale of the weight, wherever the scale starts.

        Where few elements share a scale of many bits, the base is larger: an element at a bound of the range, with the
        gradient g, then changes the scale by no larger share than g changes that element. The paper has one scale for a layer.
        """
        spec = quantizer.spec
        end = quantizer._scale * spec.qmax * (trained / quantized)
        base = torch.maximum(lsq_start(trained, spec.qmax), end / (sharing * spec.qmax) ** 0.25)
        return (quantizer._scale / base).square()

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        return ops.positive_scale(*_trained(quantizer)), quantizer._zero_point

    def start(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        return _trained(quantizer)

    def grad_factor(self, quantizer: "RangedQuantizer", x: Tensor) -> float:
        """Return 1 / sqrt(N * qmax), section 2.2 of the paper.

        N is the number of elements that share a scale: of all elements of a weight, or of the features of one sample of an
        activation. It does not depend on the batch size, and is at least 1.
        """
        spec = quantizer.spec
        count = x.numel()
        if not quantizer.of_weight and x.dim() > 1 and not spec.rows_per_scale(x.dim()):
            count = x.shape[1:].numel()
        sharing = max(count // max(quantizer._scale.numel(), 1), 1)
        factor: float = float(sharing * spec.qmax) ** -0.5
        return factor


def _trained(quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor, Tensor]:
    start, rate = start_of(quantizer)
    return start, quantizer._relative_scale, rate


def _refuse_symmetric(spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"QuantSpec: quantizer={spec.quantizer!r} trains the zero point: it needs symmetric=False, got True; take "
        f"'lsq' for a symmetric grid, as the paper does for weights."
    )


class LSQPlus(LSQ):
    """Scale s and offset beta are trained (LSQ+, arXiv 2004.09576): y = s clamp(round((x - beta) / s), qmin, qmax) + beta.

    The zero point, -beta / s, is rounded, since deployed grids have integers there, and stays within [qmin, qmax]. Both start
    at the least squared error, as in the paper, or from the range of another observer than "minmax".
    The parameter of the offset is its ratio to the scale at the start, and is trained like the scale's ratio.
    """

    label = "lsq+"
    NEEDS = (*LSQ.NEEDS, Need("symmetric", False, _refuse_symmetric))

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return LSQ's parameter, and the ratio of the offset to the scale at the start."""
        return {**super().parameters(spec), "_relative_offset": 0.0}

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        super().set_grid(quantizer, scale, zero_point)
        if quantizer._zero_point is not None:
            quantizer._relative_offset.copy_(-quantizer._zero_point.reshape(quantizer._relative_offset.shape))

    def start(self, quantizer: "RangedQuantizer") -> None:
        """Return None: the zero point is computed too."""

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the trained scale, and the zero point at the trained offset."""
        spec = quantizer.spec
        scale, _ = super().grid(quantizer)
        start, rate = start_of(quantizer)
        offset = trained_by_ratio(start, quantizer._relative_offset, rate).reshape(scale.shape)
        zero_point = -offset / scale
        return scale, straight_through(zero_point.clamp(spec.qmin, spec.qmax), zero_point)
