"""TensorQuantizer: the quantizer of prepared models, which observes ranges and fake-quantizes."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import BLOCKS
from qtoolkit.model_state import check_module
from qtoolkit.ops.layer import RawInput, WeightGrid
from qtoolkit.ops.recording import is_captured, is_recorded, is_recorded_for_onnx, is_transformed
from qtoolkit.processes import whole
from qtoolkit.quantizers import first_steps
from qtoolkit.quantizers.capability import Capability
from qtoolkit.quantizers.frozen import DynamicActivation, Grid, ShapedActivation, check_scale
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.kinds.dynamic import Dynamic
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers, spec_fields
from qtoolkit.quantizers.recomputation import check_not_recomputing, check_not_transformed, is_recomputing
from qtoolkit.quantizers.spec_ops import ends_of, fake_quant, grid_of_range, mean_magnitude
from qtoolkit.quantizers.state import LoadsFloatCheckpoints
from qtoolkit.quantizers.table import QUANTIZERS

DYNAMIC = Dynamic()


class TensorQuantizer(Quantizer, LoadsFloatCheckpoints):
    """Observe a tensor's range, quantize it, or both, with a scale that is fixed or trained.

    A new quantizer has no range. It can quantize once it has observed data (see `qtoolkit.calibrate`), `amax` was set, or
    a state dict was loaded. The scale stays in float32 when the model is cast to half precision.

    A model's `load_state_dict` takes the state dict of the float model, which has no entry of a quantizer, or one with the
    entries of all quantizers; absent ones are reported as missing keys. A state dict of another spec raises ValueError
    (the observer and the options of the quantizer may differ). Loading also restores whether a quantizer observes,
    quantizes and follows. Spec and modes are in the state dict's metadata, which a copy into a plain dict does not have: the
    modes then stay as they are, and other bits are an error where a fixed scale and its range in the dict tell them.

    A fixed scale of a weight follows the weight: each forward, in both modes, takes the range of the weight as it then is (see
    `follows`). After a calibration in training mode, the fixed range of an activation follows the data by a moving average
    for 200 steps of the optimizer, and then stays (see `follows_data`).

    Args:
        spec: How to quantize.
        channels: Number of scales along `spec.axis` (times `group`), or the shape of the scale (`spec.scale_shape`). By
            default the first input gives it.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        name: The quantizer's name in error messages.
        of_weight: Whether it quantizes a weight.
        inserted: Whether a graph pass inserted it as a node of its own.

    Attributes:
        spec: How it quantizes.
        observing: Whether forward observes its input.
        quantizing: Whether forward quantizes its input.
        following: Whether the range of a weight may follow the weight, and that of an activation the data in the first steps.
            `qtoolkit.freeze_ranges` and setting `amax` or a range clear it.
        steps: Steps of the optimizer since the calibration, while they are the first 250; then -1.
        stopping: Whether forward raises an error for NaN and infinities (see `qtoolkit.stop_on_nonfinite`).
        ready: Whether there is a range to quantize with.

    Example:
        >>> quantizer = TensorQuantizer(QuantSpec(bits=4))
        >>> quantizer.amax = 7.0
        >>> quantizer(torch.tensor([0.6, 100.0]))
        tensor([1., 7.])
    """

    MODES = ("quantizing", "observing", "following", "steps")
    _version = 4  # of the state dict

    stopping = False
    knows_factor = True  # False where the grid was set since the last forward
    steps = -1  # not read in a forward: compiled code would be compiled again for each number
    counts_steps = False  # whether it is in its first steps
    in_following_steps = False  # whether it is in those in which ranges of activations follow the data
    seen_in_step = False  # whether it was called since the last step of an optimizer
    looking = False  # whether the next forward in training says how much it clips
    looked: Tensor | None = None  # what it has said
    warned = False
    _made_for: QuantSpec  # the spec whose tensors and observer it has
    _scale: Tensor
    _zero_point: Tensor | None
    _factor: Tensor  # of a batch norm: the one for which the scales are; 0 for that of the next forward

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
        self._made_for = spec
        self.observing = False
        self.following = True
        self._shape_is_known = spec.axis is None or channels is not None or self.dynamic
        given = (channels,) if isinstance(channels, int) else channels
        shape = () if spec.axis is None or self.dynamic else given or (1,)
        for attribute, tensor in self.kind.tensors(spec, shape).items():
            register = self.register_parameter if isinstance(tensor, nn.Parameter) else self.register_buffer
            register(attribute, tensor)  # type: ignore[arg-type]  # a Parameter, or a Tensor or None
        self.observer = self.kind.observer_type(spec, of_weight).from_spec(spec, shape, group)
        self.ready = self.dynamic

    @property
    def active(self) -> bool:
        return self.observing or self.quantizing

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

    @property
    def follows(self) -> bool:
        """Whether each forward takes the range anew from its input: the weight, in training mode and in eval mode.

        So does every quantizer of a weight with a fixed scale and the observer "minmax" or "moving_average", until its range
        is frozen. The range of a histogram stays: a search at each step would take longer than the step.

        A quantizer does not know its weight. `scale`, `zero_point`, `amax` and the state dict have the range that was taken
        last: by a forward, by `eval()` of the model or a state dict loaded in eval mode, or by a calibration.
        """
        return self.of_weight and self.following and self.kind.follows(self)

    @property
    def takes_range(self) -> bool:
        """Whether a forward now takes the range of the weight.

        In eval mode one that an exporter records does not: the file has the scale as a constant. Nor does one under the
        transforms of torch.func, which cannot store it; in training mode that is an error.
        """
        return self.follows and (self.training or not (is_recorded() or is_transformed()))

    @property
    def follows_data(self) -> bool:
        """Whether, in training mode, the range of an activation follows the data, by a moving average of each forward's range.

        So does every fixed range of the observer "minmax" or "moving_average" in the first 200 steps after a calibration in
        training mode. The scale changes after the step of the optimizer.
        """
        return self.in_following_steps and self.following and not self.of_weight and self.kind.follows(self)

    @property
    def looks(self) -> bool:
        """Whether forward reads its input for more than to quantize it."""
        looking = (
            not torch.compiler.is_compiling() and self.looking
        )  # no guard in compiled code of what changes so often
        return self.observing or self.stopping or self.follows_data or looking

    # ---- the grid

    @property
    def kind(self) -> QuantizerKind:
        """The entry of the table of quantizers that the spec names."""
        return DYNAMIC if self.dynamic else QUANTIZERS[self.spec.quantizer]

    @property
    def scale(self) -> Tensor:
        """Steps between codes, positive: 0-d, or one per channel or group. Detached; NaN while there is no range."""
        with torch.no_grad():  # a node that saves tensors would upset gradient checkpointing, which counts them
            return self.kind.grid(self)[0].abs()

    @scale.setter
    def scale(self, value: object) -> None:
        self._refuse_part("scale")

    @property
    def zero_point(self) -> Tensor | None:
        """Codes of zero, as floats; None for a symmetric spec."""
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
        check_scale(self.name, scale)
        if scale.numel() not in (1, self._scale.numel()):
            raise ValueError(
                f"quantizer {self.name!r}: a range must have 1 or {self._scale.numel()} elements, got {scale.numel()}."
            )
        shape = scale.shape if scale.numel() == 1 else self._scale.shape
        self.write_grid(scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape))
        self._forget_factor()
        self.ready = True

    def load_grid(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Set the grid to that of a Grid, of the shape that it has there.

        Raises:
            ValueError: The shape does not fit, or a scale is not positive and finite.
        """
        if not self._shape_is_known:
            self._resize(tuple(scale.shape))
        check_scale(self.name, scale)
        if scale.shape != self._scale.shape:
            raise ValueError(
                f"quantizer {self.name!r}: its scale must have shape {tuple(self._scale.shape)}, got {tuple(scale.shape)}."
            )
        with torch.no_grad():
            self.kind.load_grid(self, scale, zero_point)
        self._forget_factor()
        self.ready = True

    def write_grid(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Store a scale and a zero point, unchecked: a training step must not synchronize with the device."""
        with torch.no_grad():
            self.kind.set_grid(self, scale, zero_point)

    def _not_finite(self, verb: str) -> ValueError:
        look = (
            "the weight, or the batch norm that scales it, has them"
            if self.of_weight
            else "the layer before it returns them"
        )
        large = ", or values of 8.5e37 or more, which a histogram does not count" * (self.spec.observer == "histogram")
        return ValueError(f"quantizer {self.name!r} {verb} NaN or infinities{large}: {look}, or the data has.")

    def load_observed(self) -> tuple[Tensor, Tensor]:
        """Set the grid from the range observed so far, and return that range.

        Warns:
            UserWarning: A range that is trained would start from zeros.

        Raises:
            RuntimeError: Nothing was observed.
            ValueError: An observed value is not finite, or the spec was exchanged for one with other codes.
        """
        self._check_spec()
        if not self.observer.finite():
            raise self._not_finite("has observed")
        if not self.observer.seen():
            raise RuntimeError(f"quantizer {self.name!r} has observed nothing; run data through the model first.")
        lo, hi = self.observer.range()
        self._take_range(lo, hi)
        if self.kind.LEARNED and not bool(lo.any()) and not bool(hi.any()):
            warnings.warn(
                f"quantizer {self.name!r} has seen zeros only, so quantizer={self.spec.quantizer!r} starts to train at a scale "
                f"of 1; take quantizer='fixed' for it in the QConfigMapping, whose scale follows a weight, or set its amax.",
                stacklevel=2,
            )
        return lo, hi

    def set_weight_rate(self, quantized: Tensor, trained: Tensor) -> None:
        """Train the scale of a weight at the rate that its paper means for the parameter.

        `trained` is the parameter, of the shape of what is quantized, which a batch norm may multiply before.
        """
        if not self.kind.LEARNED or not self.ready:
            return
        with torch.no_grad():
            of_quantized = mean_magnitude(quantized.detach(), self._scale, self.spec, self.group)
            of_trained = mean_magnitude(trained.detach(), self._scale, self.spec, self.group)
            sharing = quantized.numel() // max(self._scale.numel(), 1)
            self.kind.set_weight_rate(self, of_quantized, of_trained, sharing)

    def merge_observed(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace what was observed by what the observers of several processes did, each given by its `observer.state()`."""
        shape = max((state["lo"].shape for state in states), key=lambda shape: shape.numel())
        if not self._shape_is_known and shape != self._scale.shape:
            self._resize(tuple(shape))
        self.observer.merge([state for state in states if state["lo"].shape == shape])  # the others are empty

    # ---- use

    def forward(self, x: Tensor, range_of: Callable[[], Tensor] | None = None) -> Tensor:
        """Return x, quantized if `quantizing`; observe it first if `observing` or if the range follows a weight.

        `range_of` returns the tensor whose range a range that follows a weight takes, where that is another one than x.

        Raises:
            RuntimeError: `quantizing` is set, but there is no range; or `observing` is set in a recomputation of gradient
                checkpointing, whose range would not be that of the first computation.
            ValueError: `stopping` is set, and x has NaN or infinities.
            TypeError: `observing` is set, and x has integers or booleans.
        """
        self._check_finite(x)
        if is_recorded_for_onnx():
            return self._recorded_for_onnx(x)
        if self.observing:
            check_not_recomputing(self.name)
            check_not_transformed(self.name)
            self._check_type(x)
            self._fit_channels(x)
            if self.quantizing:
                return self.kind.observe_and_quantize(self, x)
            self.observer(x)
        elif self.quantizing and self.takes_range:
            check_not_transformed(self.name)
            followed = x if range_of is None else range_of()
            if followed is x:
                return self.kind.follow_and_quantize(self, x)
            self.follow(followed)
        elif self.training and self.counts_steps and not self.of_weight:
            self._take_part_in_step(x)
        return self.quantize(x) if self.quantizing else x

    def _recorded_for_onnx(self, x: Tensor) -> Tensor:
        """Return x quantized as torch.onnx.export records it: as the converted model does, unless forward would do more."""
        if self.observing or (self.training and (self.follows or self.counts_steps)):
            does = "observes its input" if self.observing else "is in training mode, in which its range changes"
            raise RuntimeError(
                f"torch.onnx.export: quantizer {self.name!r} {does}; end the calibration and call model.eval() before the "
                f"export, or write the file by qtoolkit.export_onnx."
            )
        if not self.quantizing:
            return x
        if self.dynamic:
            y: Tensor = self.to_grid()(x)
            return y
        if self.stored_in_uint8 and self.capability.direct:
            return self.in_uint8(x, self.grid_spec)
        return self.quantize(x)

    def _take_part_in_step(self, x: Tensor) -> None:
        """Observe in one of the first steps of a training."""
        if is_recomputing():
            return
        self.seen_in_step = True
        if self.follows_data:
            if self.quantizing:
                check_not_transformed(self.name)
            if is_captured(x):
                first_steps.warn_of_capture(self)
            self.kind.average(self, x)
        if not torch.compiler.is_compiling() and self.looking and self.quantizing:
            self.looked = first_steps.look(self, x)

    # ---- the factor of a batch norm

    @property
    def takes_any_scale(self) -> bool:
        """Whether its scale may be any number, and no power of two."""
        return not (self.dynamic or self.spec.pow2_scale or self.kind.POWERS)

    @property
    def follows_factor(self) -> bool:
        """Whether its scales are in units of a weight that a batch norm's factor multiplies (see `take_factor`)."""
        return "_factor" in self._buffers

    def follow_factor(self) -> None:
        """Keep the scales in units of a weight that a batch norm's factor multiplies."""
        self.register_buffer("_factor", torch.zeros_like(self._scale))

    def take_factor(self, variance: Tensor, gamma: Tensor | None, eps: float, frozen: bool = False) -> Tensor:
        """Multiply the scales by the change of a batch norm's factor since the last call; return a copy of the variance.

        So the grid is the same in units of the weight, what is trained keeps its values, and its steps are the same. The
        running variance and gamma, the batch norm's weight, are (C). With `frozen`, those with a frozen range move too.
        """
        if not self.knows_factor:
            self.knows_factor = True
        moves, stored = self.kind.LEARNED or self.following or frozen, "_scale" in self._buffers
        start = self._scale if moves and stored else torch.ones_like(self._scale)
        rate, known = self._buffers.get("_rate") if moves else None, self._factor
        if not torch.compiler.is_compiling():
            # Autograd would refuse the backward of a forward before this call, as before an evaluation. It takes the new start
            # and rate, which differ from the old ones by one step of the batch norm.
            start, rate, known = start.data, None if rate is None else rate.data, known.data
        with torch.no_grad():
            copy = ops.batch_norm_rescale_(start, rate, known, variance.detach(), gamma, eps)
            if moves and not stored:  # a kind that makes its scale of a parameter
                self.kind.load_grid(self, self.scale * start, self.zero_point)
        return copy

    def _forget_factor(self) -> None:
        """Take the grid as that for the factor of the next call of `take_factor`."""
        if self.follows_factor:
            self.knows_factor = False
            self._factor.zero_()

    def begin_steps(self, following: bool) -> None:
        """Count the steps of the training that follows a calibration; in the first ones a range may follow the data."""
        if self.of_weight and not self.kind.LEARNED:
            return
        self.warned = False
        if not self.of_weight:
            self.following = following
        self.count_steps(0)

    def count_steps(self, steps: int) -> None:
        """Take this as the number of steps since the calibration; -1 where they are no longer counted."""
        self.steps, self.counts_steps = steps, steps >= 0
        self.in_following_steps = 0 <= steps < first_steps.FOLLOWED_STEPS
        first_steps.FIRST_STEPS.count(self)

    def end_step(self) -> None:
        """Take the range that was observed in a step of the optimizer, after it."""
        if self.seen_in_step and self.follows_data:
            self.kind.take_observed(self)
        self.count_steps(self.steps + 1 if self.steps + 1 < first_steps.COUNTED_STEPS else -1)
        self.seen_in_step = False
        self.looking = self.steps + 1 in first_steps.LOOKED_AT and not self.of_weight and self.capability.direct

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "seen_in_step": False}  # the step of the optimizer is not that of a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        first_steps.FIRST_STEPS.count(self)

    def quantize(self, x: Tensor) -> Tensor:
        """Return x quantized with the present scale.

        Raises:
            RuntimeError: There is no range.
        """
        self.check_ready()
        return self.kind.quantize(self, x)

    def raw_input(self, x: Tensor) -> RawInput | None:
        """Return an input with what a layer needs to train its scale; None where a gradient goes elsewhere too."""
        if x.requires_grad or not (self.kind.LEARNED and self.capability.plain):
            return None
        scale, zero_point = self.kind.grid(self)
        if not scale.requires_grad or (zero_point is not None and zero_point.requires_grad):
            return None
        return RawInput(x, scale, self.kind.grad_factor(self, x))

    def weight_grid(self, like: Tensor, values: Callable[[], Tensor]) -> WeightGrid:
        """Return the grid on which forward would put a weight, for an op that does it (see `qtoolkit.nn.on_codes.gives_grid`).

        `like` has the weight's shape. `values` returns the weight, and is called only where the grid depends on it. Raises
        RuntimeError without a range, ValueError if `stopping` is set, and the weight has NaN or infinities.
        """
        kind, spec = self.kind, self.spec
        if self.stopping:
            self._check_finite(values())
        if self.takes_range:
            check_not_transformed(self.name)
            self.follow(values())
        self.check_ready()
        factor = kind.grad_factor(self, like)
        return WeightGrid(*kind.grid(self), spec.qmin, spec.qmax, spec.axis, self.group, spec.block_size, factor)

    def _check_finite(self, x: Tensor) -> None:
        if self.stopping and not bool(torch.isfinite(x).all()):
            raise self._not_finite("got")

    def follow(self, weight: Tensor) -> None:
        """Set the range to that of a weight, unchecked: a forward must not synchronize with the device."""
        with torch.no_grad():
            self.kind.follow(self, whole(weight))

    def quantize_rows(self, x: Tensor, index: Tensor, table: Tensor) -> Tensor:
        """Return `forward(table)[index]`, computed from the indexed rows alone.

        Args:
            x: The rows `table[index]`, (n, features), to which gradients flow.
            index: The rows' numbers, (n,).
            table: The table, (rows, features). An observer, or a range that follows it, sees all of it.
        """
        with torch.no_grad():
            self._check_finite(table)
            if self.observing:
                self._fit_channels(table)
                self.kind.observe(self, table) if self.quantizing else self.observer(table)
            elif self.takes_range:
                self.kind.follow(self, table)
        if not self.quantizing:
            return x
        self.check_ready()
        kind, spec = self.kind, self.spec
        if not kind.PLAIN:
            return kind.quantize(self, table)[index]
        scale, zero_point = kind.grid(self)
        block_size, rows = spec.block_size, spec.rows_per_scale(2)
        if rows > 1:  # blocks of rows: here of one row each
            index, block_size = index // rows, 1
        if rows > 0:
            scale, zero_point = scale[index], None if zero_point is None else zero_point[index]
        return fake_quant(spec, x, scale, zero_point, 1, block_size, kind.grad_factor(self, table))

    def check_ready(self) -> None:
        """Raise RuntimeError if there is no range to quantize with."""
        if not self.ready:
            way = "qtoolkit.tuning.QuantizationSchedule(model, observe=100)"
            steps = f", or find it in the first steps of the training with {way}" if self.training else ""
            raise RuntimeError(
                f"quantizer {self.name!r} has no range yet: call qtoolkit.calibrate(model, batches) first{steps}, or switch it "
                f"off with qtoolkit.disable_quantization(model)."
            )

    def _check_type(self, x: Tensor) -> None:
        """Raise TypeError for other numbers than floats, which have no range; a graph without example inputs may take any."""
        if x.is_floating_point():
            return
        remedy = "pass its real part" if x.is_complex() else "pass it with .to(torch.float32)"
        if self.inserted:
            what = "complex inputs" if x.is_complex() else "a mask"
            remedy += f", or give {what} in the example_inputs of qtoolkit.prepare, which then leaves it as it is"
        raise TypeError(
            f"quantizer {self.name!r} gets a tensor of {x.dtype}, and quantizes floating-point values; {remedy}."
        )

    def _check_spec(self) -> None:
        """Raise ValueError if its spec is one with other codes than it was made for: its scale and its observer are not."""
        made_for = {"spec": spec_fields(self._made_for)}
        differing = self.differing(made_for)
        if differing is not None:
            raise ValueError(
                f"quantizer {self.name!r}: its spec was changed (made for {differing}), and its scale and its observer were "
                f"not; give the layer another spec by QConfigMapping.set_module_name, and prepare the float model again."
            )

    def _fit_channels(self, x: Tensor) -> None:
        if not self._shape_is_known:
            self._resize(self.scale_shape(x))

    def to_grid(self) -> Grid | DynamicActivation | ShapedActivation:
        """Return a Grid with the present scale; with what shapes its input, if the quantizer does. It is off if this one is.

        Raises:
            RuntimeError: It has no range.
            ValueError: A scale is not positive and finite, or the spec was exchanged for one with other codes.
        """
        if not self.ready:
            raise RuntimeError(
                f"quantizer {self.name!r} saw no data, so it has no scale: call qtoolkit.calibrate(model, batches) on data "
                f"that reaches it, or leave its layer in float by the QConfigMapping."
            )
        self._check_spec()
        if self.dynamic:
            dynamic = DynamicActivation(self.spec, self.group, self.name, of_weight=False, inserted=self.inserted)
            dynamic.quantizing = self.active
            return dynamic
        scale, zero_point, spec = self.scale, self.zero_point, self.grid_spec
        check_scale(self.name, scale)
        if zero_point is not None:
            zero_point = zero_point.clamp(spec.qmin, spec.qmax)
        with torch.no_grad():
            shape = self.kind.shape(self).to(scale.device) if self.kind.shapes(self.spec) else None
        grid = Grid(
            scale.clone(),
            zero_point,
            spec,
            self.group,
            name=self.name,
            of_weight=self.of_weight,
            inserted=self.inserted,
            shape=shape if self.of_weight else None,
        )
        grid.quantizing, grid.weight_codes = self.active, self.weight_codes
        return grid if shape is None or self.of_weight else ShapedActivation(shape, grid)

    # ---- switches

    def enable(self) -> None:
        """Turn quantization on."""
        self.quantizing = True

    def disable(self) -> None:
        """Turn quantization off: forward returns its input."""
        self.quantizing = False

    # ---- state

    def materialize(self, device: torch.device) -> None:
        """Leave the meta device, without a range: for a model that was made there and got only its float tensors."""
        self.observer.put_sums_on(device)
        if self._scale.is_meta:
            self.to_empty(device=device)
            empty = torch.full_like(self._scale, torch.nan)
            self.write_grid(empty, torch.zeros_like(empty))
            self._forget_factor()
            self.observer.reset()
        elif any(buffer.is_meta for buffer in self.observer.buffers()):  # the state dict was of another observer
            self.observer.to_empty(device=device)
            self.observer.reset()

    def _resize(self, shape: tuple[int, ...]) -> None:
        self.observer.resize(shape)
        for _, tensor in self._own_tensors():
            tensor.data = tensor.data.new_full(shape, float(tensor.detach().flatten()[0]))
        self._shape_is_known = True

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        scale = state_dict.get(prefix + "_scale")
        if scale is not None and not self._shape_is_known:
            self._resize(tuple(scale.shape))
        if scale is not None and self.follows_factor:
            self.knows_factor = prefix + "_factor" in state_dict  # a state dict of version 4 may lack it
            state_dict.setdefault(prefix + "_factor", torch.zeros_like(scale))
        metadata = (
            local_metadata if "spec" in local_metadata else {**local_metadata, **self._metadata_of(state_dict, prefix)}
        )
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        self.count_steps(self.steps)
        if scale is not None:
            self.ready = not self._scale.is_meta and bool(torch.isfinite(self._scale).all())

    def _metadata_of(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return what a state dict without metadata tells of its spec: the bits by which its scale covers its range."""
        found = [state_dict.get(prefix + name) for name in ("_scale", "observer.lo", "observer.hi")]
        values = [whole(each).cpu() for each in found if isinstance(each, Tensor) and not each.is_meta]
        if not self.kind.follows(self) or len(values) < 3 or len({each.shape for each in values}) > 1:
            return {}
        scale, lo, hi = (each.double() for each in values)
        seen = lo < hi
        for bits in (self.spec.bits, *range(2, 17)):
            covering, _ = grid_of_range(lo, hi, dataclasses.replace(self.spec, bits=bits))
            if torch.allclose(covering[seen], scale[seen], rtol=1e-6, atol=0):
                return {"spec": {"bits": bits}}
        return {}

    def extra_repr(self) -> str:
        facts = {"observing": self.observing, "off": not self.quantizing, "no range yet": not self.ready}
        facts["follows the weight"] = self.follows
        facts["follows the data"] = self.follows_data
        facts["has skipped NaN or infinities"] = not self._scale.is_meta and not self.observer.finite()
        return ", ".join([self.spec.describe(), *(word for word, holds in facts.items() if holds)])


# Other packages look for NVIDIA's quantizers by the name of the class, and import modelopt to save a model that has one. So the
# class has a name of its own, by which pickles name it.
TensorQuantizer.__name__ = TensorQuantizer.__qualname__ = "ObservingQuantizer"


def quantizers_of(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Return a model's quantizers by their dotted names.

    Example:
        >>> list(qt.quantizers_of(qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")))
        ['0.weight_quantizer', 'activation_quantizers.input_1']
    """
    check_module(model, "quantizers_of")
    return named_quantizers(model, TensorQuantizer)


def has_own_forward(quantizer: TensorQuantizer) -> bool:
    """Return whether somebody has derived or set the quantizer's forward, which takes the tensor alone."""
    return type(quantizer).forward is not TensorQuantizer.forward or "forward" in vars(quantizer)


def take_names(quantizers: Mapping[str, TensorQuantizer]) -> None:
    """Let the quantizers of a model begin their errors with their dotted names in it. The model itself keeps its own."""
    for name, quantizer in quantizers.items():
        quantizer.name = name or quantizer.name
