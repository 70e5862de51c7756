"""A learned interval of magnitudes (QIL)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import Shape, Shaped
from qtoolkit.quantizers.kinds.from_start import FromStart, start_of
from qtoolkit.quantizers.spec_ops import clip, ends_of, fake_quant, per_element

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer

LEAST = 2**-24  # the least base of a power: the derivative of x^gamma at 0 is infinite for gamma below 1


class QIL(FromStart, Shaped):
    """The interval of magnitudes that is quantized is trained by its center c and distance d (QIL, arXiv 1808.05779).

    Magnitudes below c - d become 0 and those above c + d become 1; between, T(x) = sign(x) (0.5 (|x| - c) / d + 0.5)^gamma,
    which is rounded to steps of 1 / qmax. So results lie in [-1, 1]: the method is meant for layers with batch norms, which
    stay after their layers. The options are `gamma`, 1.0, and `learn_gamma`, False; the paper trains gamma for weights only.
    The interval starts as the whole observed range, c = d.
    """

    label = "qil"
    OPTIONS = {"gamma": 1.0, "learn_gamma": False}
    KEEPS_SIZE = False
    RATIOS = ("_relative_center", "_relative_distance")  # to half the range at the start

    def check(self, spec: QuantSpec) -> None:
        super().check(spec)
        options = self.options(spec)
        gamma, learn = options["gamma"], options["learn_gamma"]
        if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not gamma > 0:
            raise ValueError(
                f"QuantSpec: gamma of quantizer={spec.quantizer!r} must be a positive number, got {gamma!r}."
            )
        if not isinstance(learn, bool):
            raise ValueError(
                f"QuantSpec: learn_gamma of quantizer={spec.quantizer!r} must be true or false, got {learn!r}."
            )
        if not spec.signed and (gamma != 1 or learn):
            raise ValueError(
                f"QuantSpec: quantizer={spec.quantizer!r} needs gamma=1 with signed=False, as for activations "
                f"in the paper, got gamma={gamma!r} and learn_gamma={learn!r}."
            )

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return the ratios of center and distance, and gamma if it is trained."""
        options = self.options(spec)
        return {**super().parameters(spec), **({"_gamma": options["gamma"]} if options["learn_gamma"] else {})}

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the steps of the results, 1 / qmax; NaN while there is no range."""
        return torch.where(quantizer._scale.isnan(), quantizer._scale, 1 / quantizer.spec.qmax), None

    def interval(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor, Tensor | None]:
        """Return center, distance and gamma (None for 1). The center is at least the distance: the interval starts at 0."""
        start, rate = start_of(quantizer)
        half = start * (quantizer.spec.qmax / 2)
        distance = ops.positive_scale(half, quantizer._relative_distance, rate)
        center = torch.maximum(ops.positive_scale(half, quantizer._relative_center, rate), distance)
        options = self.options(quantizer.spec)
        fixed = None if options["gamma"] == 1 else torch.full_like(half, options["gamma"])
        return center, distance, quantizer._gamma.abs().reshape(half.shape) if options["learn_gamma"] else fixed

    def input_ends(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        """Return the range up to c + d."""
        center, distance, _ = self.interval(quantizer)
        return ends_of((center + distance).detach(), quantizer.spec.signed)

    def shape(self, quantizer: "RangedQuantizer") -> Shape:
        return Interval(quantizer.spec, quantizer.group, self.interval(quantizer))

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        spec = quantizer.spec
        center, distance, gamma = self.interval(quantizer)
        wide = x if gamma is None else x.to(torch.promote_types(x.dtype, torch.float32))
        place = ops.interval(wide, center, distance, spec.signed, spec.axis, quantizer.group, spec.block_size)
        shaped = raised(place, gamma, spec, quantizer.group).to(x.dtype)
        return fake_quant(spec, shaped, quantizer.grid()[0], None, quantizer.group, spec.block_size)


def raised(place: Tensor, gamma: Tensor | None, spec: QuantSpec, group: int) -> Tensor:
    """Return sign(place) |place|^gamma. Differentiable.

    Example:
        >>> raised(torch.tensor([0.0, 0.5, -0.5]), torch.tensor(2.0), qt.QuantSpec(quantizer="qil"), 1)
        tensor([ 0.0000,  0.2500, -0.2500])
    """
    if gamma is None:
        return place
    base, exponent = place.abs(), per_element(gamma, place, spec, group).to(place.dtype)
    return torch.where(base > LEAST, base.clamp(min=LEAST) ** exponent, base) * place.sign()


class Interval(Shape):
    """The transform with constants."""

    def __init__(self, spec: QuantSpec, group: int, interval: tuple[Tensor, Tensor, Tensor | None]) -> None:
        super().__init__()
        self.spec, self.group = spec, group
        for name, tensor in zip(("center", "distance", "gamma"), interval, strict=True):
            self.register_buffer(name, None if tensor is None else tensor.detach().clone())

    center: Tensor
    distance: Tensor
    gamma: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return T(x), by ops that a file of ONNX has: the values of `qtoolkit.ops.interval`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        center = per_element(self.center, x, self.spec, self.group).to(wide.dtype)
        distance = per_element(self.distance, x, self.spec, self.group).to(wide.dtype)
        magnitude = wide.abs() if self.spec.signed else wide
        place = clip(0.5 * (magnitude - center) / distance + 0.5, 0.0, 1.0)
        signed = place * wide.sign() if self.spec.signed else place
        return raised(signed, self.gamma, self.spec, self.group).to(x.dtype)
