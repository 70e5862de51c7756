"""Scales and bounds that are trained by their ratio to a start."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.spec_ops import lsq_start
from qtoolkit.quantizers.state import scale_dtype
from qtoolkit.running import running

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer

ACTIVATION_MEAN = 1 / math.sqrt(2 * math.pi)  # mean magnitude of relu(x), x normal with mean 0 and variance 1: 0.399


class FromStart(QuantizerKind):
    """The parameters are ratios to a start. SGD trains them as if a scale in fixed units were the parameter, the *base*.

    A step of SGD depends on the units of its parameter: divided by c, a parameter takes relative steps c^2 times as large. The
    papers train the scale of a weight, and of activations that have passed a batch norm. Here a weight before a batch norm is
    quantized times the batch norm's factor, and activations have the units of any network. So the gradient of a ratio is
    divided by the square of a base that does not depend on these units (see `qtoolkit.ops.positive_scale`, whose `rate` is
    (start / base)^2):

    - for a weight, the start in units of the weight that is trained, without the batch norm's factor;
    - for an activation, the start in units in which the activation's scale is `lsq_start(ACTIVATION_MEAN, qmax)`, as for
      a standard normal after a ReLU.
    """

    RATIOS: ClassVar[tuple[str, ...]] = ()  # the names of the ratios

    def ratios(self, spec: QuantSpec) -> tuple[str, ...]:
        """Return the names of the ratios of a spec."""
        return self.RATIOS

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        return dict.fromkeys(self.ratios(spec), 1.0)

    def tensors(self, spec: QuantSpec, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the start, its rate and the zero point as buffers, and the trained parameters."""
        return {**super().tensors(spec, shape), "_rate": torch.ones(shape, dtype=scale_dtype())}

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the grid as the start of training. An activation's rate follows from it, a weight's is kept."""
        before = quantizer._scale.clone()
        super().set_grid(quantizer, scale, zero_point)
        if quantizer.of_weight:
            kept = self.kept_rate(quantizer, before)
            quantizer._rate.copy_(torch.where(before.isfinite() & kept.isfinite(), kept, 1))
        else:
            quantizer._rate.copy_(self.activation_rate(quantizer._scale, quantizer.spec))
        for ratio in self.ratios(quantizer.spec):
            getattr(quantizer, ratio).fill_(1)

    def growth(self, quantizer: "RangedQuantizer") -> Tensor | None:
        """Return the magnitude of the ratio, where there is one alone."""
        ratios = self.ratios(quantizer.spec)
        return getattr(quantizer, ratios[0]).detach().abs() if len(ratios) == 1 else None

    def kept_rate(self, quantizer: "RangedQuantizer", before: Tensor) -> Tensor:
        """Return the rate of a weight whose start was `before`: by default as it is, with the batch norm's factor."""
        rate: Tensor = quantizer._rate
        return rate

    def activation_rate(self, start: Tensor, spec: QuantSpec) -> Tensor:
        """Return the rate of an activation's start."""
        base: float = lsq_start(ACTIVATION_MEAN, spec.qmax)
        return (start / base).square()

    def set_weight_rate(self, quantizer: "RangedQuantizer", quantized: Tensor, trained: Tensor, sharing: int) -> None:
        """Store the rate of a weight; it is 1 where the weight is zero."""
        rate = self.weight_rate(quantizer, quantized, trained, sharing)
        quantizer._rate.copy_(torch.where((rate > 0) & rate.isfinite(), rate, 1))

    def weight_rate(self, quantizer: "RangedQuantizer", quantized: Tensor, trained: Tensor, sharing: int) -> Tensor:
        """Return the rate of a weight: by default the square of the batch norm's factor."""
        return (quantized / trained).square()


def start_of(quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
    """Return the start of the trained parameters, and their rate.

    In a training that torch.export records these are copies: the next call of the layer writes the change of its batch norm's
    factor into the tensors, and autograd would refuse the backward of this call.
    """
    start, rate = quantizer._scale, quantizer._rate
    if quantizer.follows_factor and quantizer.training and running().exported:
        return start.clone(), rate.clone()
    return start, rate


def trained_bound(quantizer: "RangedQuantizer") -> Tensor:
    """Return the bound of a symmetric range, which is trained by `_relative_bound`, its ratio to its start."""
    start, rate = start_of(quantizer)
    return ops.positive_scale(start * quantizer.spec.qmax, quantizer._relative_bound, rate)
