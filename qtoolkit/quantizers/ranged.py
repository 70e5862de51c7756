"""RangedQuantizer: a quantizer with a range, as the table of quantizers stores, sets and trains it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import BLOCKS
from qtoolkit.errors import warn
from qtoolkit.quantizers.capability import Capability
from qtoolkit.quantizers.checks import check_spec, not_finite, not_ready
from qtoolkit.quantizers.frozen import check_scale
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.kinds.dynamic import Dynamic
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.spec_ops import ends_of, grid_of_range, mean_magnitude, typed_scale
from qtoolkit.quantizers.state import LoadsFloatCheckpoints
from qtoolkit.quantizers.table import QUANTIZERS
from qtoolkit.running import Run

if TYPE_CHECKING:
    from qtoolkit.quantizers.first_steps import Watched

DYNAMIC = Dynamic()


class RangedQuantizer(Quantizer, LoadsFloatCheckpoints):
    """The part of `TensorQuantizer`, which has its arguments, that has the range: scale, zero point and observer.

    Its kind, an entry of the table of quantizers, reads and writes the stored tensors.
    """

    _scale: Tensor
    _zero_point: Tensor | None
    _factor: Tensor  # of a batch norm: the one for which the scales are; 0 for the next forward's

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a parameter of the kind of quantizer."""

    def __init__(
        self,
        spec: QuantSpec,
        channels: int | tuple[int, ...] | None = None,
        group: int = 1,
        name: str = "quantizer",
        *,
        of_weight: bool = False,
        inserted: bool = False,
    ) -> None:
        super().__init__(spec, group, name, of_weight=of_weight, inserted=inserted)
        if group > 1 and spec.axis is None:
            raise ValueError(f"TensorQuantizer: group={group} needs a spec with an axis, got axis=None.")
        if of_weight and spec.dynamic:
            raise ValueError(
                f"quantizer {self.name!r}: dynamic=True is for activations, got a weight, whose range follows it anyway; leave "
                f"dynamic out of its spec."
            )
        self.kind.check_use(spec, self.name, of_weight)
        self.made_for = spec  # the spec whose tensors and observer it has
        self.observing, self.following, self.stopping = False, True, False
        # While a range follows the data: the clock at the last forward, and the steps of the training so far. No buffer: those
        # who average the buffers of models take them by their places, and this one goes.
        self.count_of_steps: Tensor | None = None
        self.watched: Watched | None = None  # in the first steps
        self.warned, self.last_read_input = False, False
        self._shape_is_known = spec.axis is None or channels is not None or self.dynamic
        given = (channels,) if isinstance(channels, int) else channels
        shape = () if spec.axis is None or self.dynamic else given or (1,)
        for attribute, tensor in self.kind.tensors(spec, shape).items():
            register = self.register_parameter if isinstance(tensor, nn.Parameter) else self.register_buffer
            register(attribute, tensor)  # type: ignore[arg-type]  # a Parameter, or a Tensor or None
        self.observer = self.kind.observer_type(spec, of_weight).from_spec(spec, shape, group)
        self.ready = self.dynamic

    @property
    def grid_spec(self) -> QuantSpec:
        """The spec of the grid on which its values lie."""
        return self.kind.grid_spec(self.spec)

    @property
    def dynamic(self) -> bool:
        """Whether it computes its scales from each input; weights have scales of their own."""
        return not self.of_weight and (self.spec.dynamic or self.spec.format in BLOCKS)

    def _find_capability(self) -> Capability:
        direct = not self.dynamic and not self.kind.shapes(self.spec)
        return Capability.of(self.grid_spec, direct, self.kind.PLAIN)

    # ---- the grid

    @property
    def kind(self) -> QuantizerKind:
        """The entry of the table of quantizers that the spec names."""
        return DYNAMIC if self.dynamic else QUANTIZERS[self.spec.quantizer]

    def grid(self) -> tuple[Tensor, Tensor | None]:
        """Return the differentiable scale and zero point with which it quantizes, the scale in numbers of its type."""
        scale, zero_point = self.kind.grid(self)
        return typed_scale(self.spec, scale), zero_point

    @property
    def float16(self) -> bool:
        """Whether its scales are numbers of float16."""
        return self.spec.scale_dtype == "float16"

    @property
    def scale(self) -> Tensor:
        """Step sizes, positive: 0-d, or one per channel or group. Detached; NaN while there is no range."""
        with torch.no_grad():  # a node that saves tensors would upset gradient checkpointing, which counts them
            return self.grid()[0].abs()

    @scale.setter
    def scale(self, value: object) -> None:
        self._refuse_part("scale")

    @property
    def zero_point(self) -> Tensor | None:
        """Integers that zero maps to, as floats; None for a symmetric spec."""
        with torch.no_grad():
            zero_point = self.kind.grid(self)[1]
            return None if zero_point is None else zero_point.round()

    @zero_point.setter
    def zero_point(self, value: object) -> None:
        self._refuse_part("zero_point")

    def _refuse_part(self, name: str) -> NoReturn:
        raise AttributeError(
            f"quantizer {self.name!r}: {name} cannot be set alone, as the kind of quantizer may store it in another form; call "
            f"set_range(lo, hi), or set amax."
        )

    @property
    def amax(self) -> Tensor:
        """Largest magnitude on a symmetric grid, scale * qmax: 0-d, or one per channel."""
        return self.scale * self.spec.qmax

    @amax.setter
    def amax(self, value: Tensor | float) -> None:
        amax = torch.as_tensor(value, dtype=self._scale.dtype, device=self._scale.device)
        if bool((amax < 0).any()):
            raise ValueError(f"quantizer {self.name!r}: amax must not be negative, got {float(amax.min())}.")
        self.set_range(*ends_of(amax, self.spec.signed))

    def set_range(self, lo: Tensor | float, hi: Tensor | float) -> None:
        """Set the grid to cover the range [lo, hi], of one element or one per channel, and keep it in training.

        Raises:
            ValueError: A lowest value is above its highest, the range is not finite, or its number of elements does not fit.
        """
        low, high = (torch.as_tensor(end, dtype=self._scale.dtype, device=self._scale.device) for end in (lo, hi))
        low, high = low + torch.zeros_like(high), high + torch.zeros_like(low)  # of one shape
        if bool((low > high).any()):
            first = (low > high).flatten().nonzero()[0]
            raise ValueError(
                f"quantizer {self.name!r}: lo must not be above hi, got the range [{float(low.flatten()[first]):g}, "
                f"{float(high.flatten()[first]):g}]; pass set_range(lo, hi)."
            )
        self._take_range(low, high)
        self.following = False

    def _take_range(self, lo: Tensor, hi: Tensor) -> None:
        scale, zero_point = grid_of_range(lo.to(self._scale), hi.to(self._scale), self.spec)
        check_scale(self.name, scale, self.spec)
        if scale.numel() not in (1, self._scale.numel()):
            raise ValueError(
                f"quantizer {self.name!r}: a range must have 1 or {self._scale.numel()} elements, got {scale.numel()}."
            )
        shape = scale.shape if scale.numel() == 1 else self._scale.shape
        self.write_grid(scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape))
        self.forget_factor()
        self.ready = True

    def load_grid(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Take the grid of a Grid, of the shape that it has there.

        Raises:
            ValueError: The shape does not fit, or a scale is not positive and finite.
        """
        if not self._shape_is_known:
            self.resize(tuple(scale.shape))
        check_scale(self.name, scale, self.spec)
        if scale.shape != self._scale.shape:
            raise ValueError(
                f"quantizer {self.name!r}: its scale must have shape {tuple(self._scale.shape)}, got {tuple(scale.shape)}."
            )
        with torch.no_grad():
            self.kind.load_grid(self, scale, zero_point)
        self.forget_factor()
        self.ready = True

    def write_grid(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Store a scale and a zero point, unchecked: a training step must not synchronize with the device."""
        with torch.no_grad():
            self.kind.set_grid(self, scale, zero_point)

    def load_observed(self) -> tuple[Tensor, Tensor]:
        """Set the grid from the observed range, and return that range.

        Warns:
            UserWarning: A range that is trained would start from zeros.

        Raises:
            RuntimeError: Nothing was observed.
            ValueError: An observed value is not finite, or the spec was exchanged for one with other integers.
        """
        check_spec(self)
        if not self.observer.finite():
            raise not_finite(self, "has observed")
        if not self.observer.seen():
            raise RuntimeError(f"quantizer {self.name!r} has observed nothing; run data through the model first.")
        lo, hi = self.observer.range()
        self._take_range(lo, hi)
        if self.kind.LEARNED and not bool(lo.any()) and not bool(hi.any()):
            warn(
                f"quantizer {self.name!r} has seen zeros only, so quantizer={self.spec.quantizer!r} starts to train at a scale "
                f"of 1; take quantizer='fixed' for it in the QConfigMapping, whose scale follows a weight, or set its amax.",
            )
        return lo, hi

    def set_weight_rate(self, quantized: Tensor, trained: Tensor) -> None:
        """Train the scale of a weight at the rate that its paper means for the parameter.

        `trained` is the parameter, of the shape of the quantized tensor, which a batch norm may multiply before.
        """
        if not self.kind.LEARNED or not self.ready:
            return
        with torch.no_grad():
            of_quantized = mean_magnitude(quantized.detach(), self._scale, self.spec, self.group)
            of_trained = mean_magnitude(trained.detach(), self._scale, self.spec, self.group)
            sharing = quantized.numel() // max(self._scale.numel(), 1)
            self.kind.set_weight_rate(self, of_quantized, of_trained, sharing)

    def merge_observed(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the observations by all processes' observations, each given by its `observer.state()`."""
        shape = max((state["lo"].shape for state in states), key=lambda shape: shape.numel())
        if not self._shape_is_known and shape != self._scale.shape:
            self.resize(tuple(shape))
        self.observer.merge([state for state in states if state["lo"].shape == shape])  # the others are empty

    # ---- the factor of a batch norm

    @property
    def takes_any_scale(self) -> bool:
        """Whether its scale may be any number, and no power of two."""
        return not (self.dynamic or self.spec.pow2_scale or self.kind.POWERS)

    @property
    def follows_factor(self) -> bool:
        """Whether its scales are in units of a weight that a batch norm's factor multiplies (see `rescale_to_bn_factor`)."""
        return "_factor" in self._buffers

    def follow_factor(self) -> None:
        """Keep the scales in units of a weight that a batch norm's factor multiplies."""
        self.register_buffer("_factor", torch.zeros_like(self._scale))

    def rescale_to_bn_factor(
        self,
        run: Run,
        variance: Tensor,
        gamma: Tensor | None,
        eps: float,
        *,
        frozen: bool = False,
        of_step: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Multiply the scales by the change of a batch norm's factor since the last call; return a copy of the variance.

        So the grid is the same in units of the weight, trained parameters keep their values, and their steps are the same. The
        running variance and gamma, the batch norm's weight, are (C). With `frozen`, scales with a frozen range move too.
        `of_step` has the last three arguments of `qtoolkit.ops.batch_norm_rescale_`.
        """
        moves, stored = self.kind.LEARNED or self.following or frozen, "_scale" in self._buffers
        start = self._scale if moves and stored else torch.ones_like(self._scale)
        rate, known = self._buffers.get("_rate") if moves else None, self._factor
        if not run.exported:  # torch.export takes .data for a constant
            # Autograd would refuse the backward of a forward before this call, as before an evaluation, and of the layer's call
            # before it. It takes the new start and rate, which differ from the old ones by one step of the batch norm at most.
            start, rate, known = start.data, None if rate is None else rate.data, known.data
        with torch.no_grad():
            copy = ops.batch_norm_rescale_(start, rate, known, variance, gamma, eps, *(of_step or ()))
            if moves and not stored:  # a kind that makes its scale of a parameter
                self.kind.load_grid(self, self.kind.grid(self)[0].abs() * start, self.zero_point)
        return copy

    def forget_factor(self) -> None:
        """Take the grid as it is for the factor of the next call of `rescale_to_bn_factor`."""
        if self.follows_factor:
            self._factor.zero_()

    # ---- use

    def quantize(self, x: Tensor) -> Tensor:
        """Return x quantized with the present scale.

        Raises:
            RuntimeError: There is no range.
        """
        self.check_ready()
        return self.kind.quantize(self, x)

    def check_ready(self) -> None:
        """Raise RuntimeError if there is no range to quantize with."""
        if not self.ready:
            raise not_ready(self)

    def fit_channels(self, x: Tensor) -> None:
        """Give the scale the shape for an input, if the first one has it."""
        if not self._shape_is_known:
            self.resize(self.scale_shape(x))

    def resize(self, shape: tuple[int, ...]) -> None:
        """Give the scale and the observations this shape."""
        self.observer.resize(shape)
        for tensor in (each for _, each in self._own_tensors() if each.is_floating_point()):
            tensor.data = tensor.data.new_full(shape, float(tensor.detach().flatten()[0]))
        self._shape_is_known = True
