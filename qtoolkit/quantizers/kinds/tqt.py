"""A trained power-of-two scale (TQT)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import NEEDS_INTEGERS, NEEDS_NO_ZERO_POINT, QuantizerKind
from qtoolkit.quantizers.spec_ops import straight_through

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer

LN2 = math.log(2)
LEAST, MOST = -100, 127  # of the logarithm of a threshold: its scale is a normal float32
SAME = 1e-5  # logarithms this near to a whole number belong to a power of two, up to the rounding of a scale


class TQT(QuantizerKind):
    """The logarithm of the threshold t is trained, and the scale is a power of two (TQT, arXiv 1903.08066).

    s = 2^ceil(log2 t) / 2^(bits-1), or / 2^bits for unsigned integers. The gradient passes straight through the ceiling:
    ds / dlog2 t = s ln 2. The threshold starts at the largest magnitude of the observed range, by default the
    range of the least squared error. The paper trains it with Adam.
    """

    POWERS = True
    label = "tqt"
    NEEDS = (NEEDS_INTEGERS, NEEDS_NO_ZERO_POINT)

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        return {"_log2_threshold": 0.0}

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the threshold, scale * qmax, and the power-of-two scale that it gives."""
        self._set_threshold(quantizer, scale * quantizer.spec.qmax)

    def load_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store a power-of-two scale."""
        self._set_threshold(quantizer, scale * (quantizer.spec.qmax + 1))

    def _set_threshold(self, quantizer: "RangedQuantizer", threshold: Tensor) -> None:
        shape = quantizer._log2_threshold.shape
        exponent = threshold.log2().expand(quantizer._scale.shape).reshape(shape)
        nearest = exponent.round()
        quantizer._log2_threshold.copy_(torch.where((exponent - nearest).abs() < SAME, nearest, exponent))
        quantizer._scale.copy_(self.grid(quantizer)[0])

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        threshold = quantizer._log2_threshold.reshape(quantizer._scale.shape)
        scale = torch.exp2(threshold.detach().ceil().clamp(LEAST, MOST)) / (quantizer.spec.qmax + 1)
        return straight_through(scale, scale * LN2 * threshold), None

    def growth(self, quantizer: "RangedQuantizer") -> Tensor | None:
        """Return the scale as a multiple of its start."""
        return (quantizer.scale / quantizer._scale).reshape(-1)
