"""TensorQuantizer: the quantizer of prepared models, which observes ranges and fake-quantizes."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from qtoolkit.model_state import check_module
from qtoolkit.processes import whole
from qtoolkit.quantizers.checks import check_finite
from qtoolkit.quantizers.first_steps import FOLLOWED_STEPS, LAST_STEP, WATCHER, Watched, after, look
from qtoolkit.quantizers.float16_scales import warn_of_other_type
from qtoolkit.quantizers.freezing import frozen_form
from qtoolkit.quantizers.frozen import DynamicActivation, Grid, ShapedActivation
from qtoolkit.quantizers.loading import metadata_of
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.ranged import RangedQuantizer
from qtoolkit.quantizers.states import CALIBRATING, FOLLOWS_DATA, FOLLOWS_WEIGHT, FROZEN, LEARNED, State
from qtoolkit.quantizers.step_clock import CLOCK, NEVER
from qtoolkit.running import Run, running


class TensorQuantizer(RangedQuantizer):
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
    for 200 steps of the optimizer, and then stays (see `follows_data`). docs/design/quantizer.md has its states.

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
        following: Whether the range of a weight may follow the weight, and the range of an activation the data in the first
            steps. `qtoolkit.freeze_ranges` and setting `amax` or a range clear it.
        stopping: Whether forward raises an error for NaN and infinities (see `qtoolkit.stop_on_nonfinite`).
        ready: Whether there is a range to quantize with.

    Example:
        >>> quantizer = TensorQuantizer(QuantSpec(bits=4))
        >>> quantizer.amax = 7.0
        >>> quantizer(torch.tensor([0.6, 100.0]))
        tensor([1., 7.])
    """

    # Not `stopping`: it searches one run for NaN, and a state dict must not turn the search on where it is loaded.
    MODES = ("quantizing", "observing", "following", "steps")
    _version = 4  # of the state dict

    @property
    def active(self) -> bool:
        return self.observing or self.quantizing

    # ---- what its range does

    @property
    def state(self) -> State:
        """The behavior of its range in a forward: one of the five states in `qtoolkit.quantizers.states`."""
        if self.observing:
            return CALIBRATING
        if self.kind.LEARNED:
            return LEARNED
        return FOLLOWS_WEIGHT if self.follows else FOLLOWS_DATA if self.follows_data else FROZEN

    @property
    def follows(self) -> bool:
        """Whether each forward takes the range anew from its input: the weight, in training mode and in eval mode.

        Every quantizer of a weight with a fixed scale and the observer "minmax" or "moving_average" does so, until its
        range is frozen. The range of a histogram stays: a search at each step would take longer than the step.

        A quantizer does not know its weight. `scale`, `zero_point`, `amax` and the state dict have the range that was taken
        last: by a forward, by `eval()` of the model or a state dict loaded in eval mode, or by a calibration.
        """
        return self.of_weight and self.following and self.kind.follows(self)

    def takes_range(self, run: Run) -> bool:
        """Return whether a forward takes the range of the weight.

        In eval mode, a forward that an exporter records does not: the file has the scale as a constant. A forward under
        the transforms of torch.func, which cannot store it, does not either; in training mode it raises an error.
        """
        return self.follows and (self.training or run.own_ops)

    @property
    def follows_data(self) -> bool:
        """Whether, in training mode, the range of an activation follows the data, by a moving average of each forward's range.

        Every fixed range of the observer "minmax" or "moving_average" does so in the first 200 steps after a
        calibration in training mode. The scale changes at the first forward of a step (see
        `qtoolkit.quantizers.step_clock`).
        """
        return self.count_of_steps is not None and self.following and self.kind.follows(self)

    def reads_input(self, run: Run) -> bool:
        """Return whether forward reads its input for more than to quantize it, so that no other op may compute it.

        A recomputation of gradient checkpointing repeats the forward before it: it must save the same tensors, also where
        an optimizer has taken a step in between.
        """
        if run.compiled:
            return self.observing or self.stopping or self.follows_data
        if not run.recomputes:
            self.last_read_input = self.observing or self.stopping or self.follows_data or self.clip_check_due
        return self.last_read_input

    @property
    def clip_check_due(self) -> bool:
        """Whether the next forward in training looks at how much it clips."""
        return self.watched is not None and self.watched.clip_check_due

    @property
    def steps(self) -> int:
        """Steps of the training since the calibration, while they are the first 250; then -1. Waits for the device.

        Setting them begins or ends the first steps.
        """
        if self.count_of_steps is not None and not self.count_of_steps.is_meta:
            return int(self.count_of_steps[1])
        return NEVER if self.watched is None else self.watched.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.watched, self.count_of_steps = None, None
        if not 0 <= steps <= LAST_STEP:
            return
        self.watched = Watched(steps)
        WATCHER.watch(self)
        if steps < FOLLOWED_STEPS and self.following and not self.of_weight and self.kind.follows(self):
            CLOCK.begin(self._scale.device)
            with torch.inference_mode(
                False
            ):  # a training changes it, which it may not do to a tensor of inference mode
                self.count_of_steps = torch.tensor([NEVER, steps], device=self._scale.device)

    def begin_steps(self, following: bool) -> None:
        """Count the steps of the training that follows a calibration; in the first ones a range may follow the data."""
        if self.of_weight and not self.kind.LEARNED:
            return
        self.warned = False
        if not self.of_weight:
            self.following = following
        self.steps = 0

    def end_step(self) -> None:
        """Note a step of an optimizer, for the warnings of the first steps, and end them after the last one.

        A range that has followed the data for all its steps takes the range of the last one, and observation ends.
        """
        watched, count = self.watched, self.count_of_steps
        if watched is None:
            return
        if count is not None and not self.following:  # the range was set
            count = self.count_of_steps = None
        steps = watched.steps + 1
        # Not after each step: a look at the count waits for the device.
        if count is not None and steps >= FOLLOWED_STEPS and steps % (FOLLOWED_STEPS // 4) == 0:
            followed = int(count[1])
            if followed == FOLLOWED_STEPS and self.follows_data:
                self.kind.take_observed(self)
            if followed >= FOLLOWED_STEPS:
                self.count_of_steps = None
        done = steps > LAST_STEP and self.count_of_steps is None
        self.watched = None if done else after(watched, not self.of_weight and self.capability.direct)

    # ---- use

    def forward(self, x: Tensor, range_of: Callable[[], Tensor] | None = None) -> Tensor:
        """Return x, quantized if `quantizing`; observe it first if `observing` or if the range follows a weight.

        `range_of` returns the tensor whose range a range that follows a weight takes, where that is another one than x.

        Raises:
            RuntimeError: `quantizing` is set, but there is no range; or `observing` is set in a recomputation of gradient
                checkpointing, whose range would not be the first computation's.
            ValueError: `stopping` is set, and x has NaN or infinities.
            TypeError: `observing` is set, and x has integers or booleans.
        """
        check_finite(self, x)
        run = running()
        if run.for_onnx:
            return self._recorded_for_onnx(x)
        # No code is compiled for what changes so often.
        if not (run.compiled or run.recomputes) and self.training and self.quantizing and self.clip_check_due:
            self._check_clipping(x)
        return self.state.forward(run, self, x, range_of)

    def _check_clipping(self, x: Tensor) -> None:
        if self.watched is not None:
            self.watched.clipped = look(self, x)

    def _recorded_for_onnx(self, x: Tensor) -> Tensor:
        """Return x quantized as torch.onnx.export records it: as the converted model does, unless forward would do more."""
        if self.observing or (self.training and (self.follows or self.follows_data)):
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        count = self.count_of_steps
        if count is not None:
            device = fn(count).device  # its values stay: `to_empty` and `type` are for what a state dict brings back
            if count.is_meta and device.type != "meta":
                count = torch.tensor([NEVER, NEVER if self.watched is None else self.watched.steps])
            self.count_of_steps = count.to(device)
            CLOCK.begin(device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "watched": None if self.watched is None else self.watched.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        steps = state["watched"]
        super().__setstate__({**state, "watched": None if steps is None else Watched(steps)})
        if self.watched is not None:
            WATCHER.watch(self)
        if self.count_of_steps is not None:
            CLOCK.begin(self.count_of_steps.device)

    # ---- for ops and layers

    def follow(self, weight: Tensor) -> None:
        """Set the range to a weight's, unchecked: a forward must not synchronize with the device."""
        with torch.no_grad():
            self.kind.follow(self, whole(weight))

    def to_grid(self) -> Grid | DynamicActivation | ShapedActivation:
        """Return the quantizer that takes its place in a converted model (see `frozen_form`, and its errors)."""
        return frozen_form(self)

    # ---- switches

    def enable(self) -> None:
        """Turn quantization on."""
        self.quantizing = True

    def disable(self) -> None:
        """Turn quantization off: forward returns its input."""
        self.quantizing = False

    # ---- state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        scale = state_dict.get(prefix + "_scale")
        if scale is not None and not self._shape_is_known:
            self.resize(tuple(scale.shape))
        if scale is not None and self.follows_factor:
            # A state dict of version 4 may lack it.
            state_dict.setdefault(prefix + "_factor", torch.zeros_like(scale))
        told = {} if "spec" in local_metadata else metadata_of(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, {**local_metadata, **told}, *args)
        saved = local_metadata.get("spec", {}).get("scale_dtype", "float32")
        if scale is not None and "spec" in local_metadata and saved != self.spec.scale_dtype:
            warn_of_other_type(saved, self.spec.scale_dtype)
        if scale is not None:
            self.ready = not self._scale.is_meta and bool(torch.isfinite(self._scale).all())

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
    """Return a model's quantizers by their dotted names, of a model in DistributedDataParallel too.

    Example:
        >>> list(qt.quantizers_of(qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")))
        ['0.weight_quantizer', 'activation_quantizers.input_1']
    """
    return named_quantizers(check_module(model, "quantizers_of"), TensorQuantizer)


def has_own_forward(quantizer: TensorQuantizer) -> bool:
    """Return whether the quantizer's forward was overridden or set: it then takes the tensor alone."""
    return type(quantizer).forward is not TensorQuantizer.forward or "forward" in vars(quantizer)


def take_names(quantizers: Mapping[str, TensorQuantizer]) -> None:
    """Let the quantizers of a model begin their errors with their dotted names in it. The model itself keeps its own."""
    for name, quantizer in quantizers.items():
        quantizer.name = name or quantizer.name
