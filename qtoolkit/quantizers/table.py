"""The tables behind QuantSpec's `quantizer` and `observer`.

To add a learned quantizer, write a subclass of `QuantizerKind` and one line in `QUANTIZERS`. `QuantSpec(quantizer=...)`
then knows its name and checks its options; `TensorQuantizer`, the reports, checkpoints, conversion and export need no
change. A quantizer that trains the logarithm of the scale:

    >>> class LogScale(QuantizerKind):
    ...     label = "log_scale"
    ...     OPTIONS = {"grad_factor": 1.0}
    ...     def tensors(self, spec, shape):
    ...         return {**super().tensors(spec, shape), "_scale": nn.Parameter(torch.full(shape, torch.nan))}
    ...     def set_grid(self, quantizer, scale, zero_point):
    ...         super().set_grid(quantizer, scale.log2(), zero_point)
    ...     def grid(self, quantizer):
    ...         return quantizer._scale.exp2(), quantizer._zero_point
    ...     def grad_factor(self, quantizer, x):
    ...         return self.options(quantizer.spec)["grad_factor"]
    >>> QUANTIZERS["log_scale"] = LogScale()
    >>> spec = qt.QuantSpec(bits=4, quantizer="log_scale", quantizer_args={"grad_factor": 0.1})
    >>> spec.describe()
    'int4 log_scale'
    >>> quantizer = qt.TensorQuantizer(spec)
    >>> quantizer.amax = 7.0
    >>> quantizer(torch.tensor([0.6, 100.0]))
    tensor([1., 7.], grad_fn=...)
    >>> del QUANTIZERS["log_scale"]

To add an observer, write a subclass of `Observer` and one line in `OBSERVERS`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.quantizers.observers import (
    ClipStdObserver,
    HistogramObserver,
    LSQStartObserver,
    MovingAverageObserver,
    MovingHistogramObserver,
    Observer,
    Pow2ModeObserver,
    Pow2Observer,
    RangeObserver,
)
from qtoolkit.quantizers.spec_ops import fake_quant, grid_of_range
from qtoolkit.quantizers.state import scale_dtype

if TYPE_CHECKING:  # QuantSpec checks itself by these tables
    from qtoolkit.config import QuantSpec
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


class QuantizerKind:
    """How a TensorQuantizer stores, initializes and trains its scale. The TensorQuantizer holds all state.

    This base class stores scale and zero point as buffers, initialized from the observed range.

    Attributes:
        label: Short name in reports; "" for none.
        OPTIONS: The options that `QuantSpec.quantizer_args` may hold, with their defaults.
        fake_quant: Quantizes and dequantizes, with the arguments of `qtoolkit.quantizers.spec_ops.fake_quant`.
    """

    label: str = ""
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    fake_quant = staticmethod(fake_quant)

    def check(self, spec: "QuantSpec") -> None:
        """Raise ValueError for a spec that this quantizer does not support, or for an option out of its range."""

    def observer_type(self, spec: "QuantSpec") -> type[Observer]:
        """Return the type of the observer of a spec."""
        return OBSERVERS[spec.observer]

    def options(self, spec: "QuantSpec") -> dict[str, Any]:
        """Return the value of each option."""
        return {**self.OPTIONS, **spec.quantizer_args}

    def tensors(self, spec: "QuantSpec", shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return new parameters and buffers, named as in the state dict, each of the scale's shape.

        `_scale` and `_zero_point` are required. `_scale` is NaN while there is no range; `_zero_point` is None for a
        symmetric spec.
        """
        zero_point = None if spec.symmetric else torch.zeros(shape, dtype=scale_dtype())
        return {"_scale": torch.full(shape, torch.nan, dtype=scale_dtype()), "_zero_point": zero_point}

    def upgrade(self, state: dict[str, Any], prefix: str) -> None:
        """Change the entries of a state dict from before `TensorQuantizer`'s version 2 to those of today."""

    def set_grid(self, quantizer: "TensorQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the scale and the zero point of a range; called under torch.no_grad."""
        quantizer._scale.copy_(scale)
        if quantizer._zero_point is not None and zero_point is not None:
            quantizer._zero_point.copy_(zero_point)

    def grid(self, quantizer: "TensorQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the differentiable scale and zero point. Ops use the scale's magnitude and the rounded zero point."""
        return quantizer._scale, quantizer._zero_point

    def grad_factor(self, quantizer: "TensorQuantizer", x: Tensor) -> float:
        """Return the factor of the gradients of scale and zero point, for the input x."""
        return 1.0

    def growth(self, quantizer: "TensorQuantizer") -> Tensor | None:
        """Return how many times their start the trained scales are; None where there is no start to compare with."""
        return None

    def observe(self, quantizer: "TensorQuantizer", x: Tensor) -> None:
        """Observe x while quantizing."""
        quantizer.observer(x)

    def observe_and_quantize(self, quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
        """Observe x, and return it quantized with the scale that then holds."""
        self.observe(quantizer, x)
        return quantizer.quantize(x)

    def follows(self, quantizer: "TensorQuantizer") -> bool:
        """Return whether the range can follow a weight in training, by `follow` and `follow_and_quantize`."""
        return False

    def follow(self, quantizer: "TensorQuantizer", x: Tensor) -> None:
        """Set the range to that of x alone."""
        raise NotImplementedError

    def follow_and_quantize(self, quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
        """Set the range to that of x alone, and return x quantized with it."""
        self.follow(quantizer, x)
        return quantizer.quantize(x)


class FixedScale(QuantizerKind):
    """The scale is that of a range: as calibrated, of a weight as it is, or with `observing` as observed so far."""

    def follows(self, quantizer: "TensorQuantizer") -> bool:
        """Return whether the observer takes the range of one tensor in one read."""
        return isinstance(quantizer.observer, RangeObserver)

    def observe(self, quantizer: "TensorQuantizer", x: Tensor) -> None:
        """Observe x, and set the scale from the range so far."""
        quantizer.observer(x)
        self._take_observed(quantizer)

    def follow(self, quantizer: "TensorQuantizer", x: Tensor) -> None:
        """Set the range and the scale to those of x alone."""
        if isinstance(quantizer.observer, RangeObserver):
            quantizer.observer.follow(x)
        self._take_observed(quantizer)

    def observe_and_quantize(self, quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
        """Do both in one op where there is one."""
        fused = self._in_one_op(quantizer, x, alone=False)
        return super().observe_and_quantize(quantizer, x) if fused is None else fused

    def follow_and_quantize(self, quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
        """Do both in one op where there is one."""
        fused = self._in_one_op(quantizer, x, alone=True)
        return super().follow_and_quantize(quantizer, x) if fused is None else fused

    def _take_observed(self, quantizer: "TensorQuantizer") -> None:
        quantizer.ready = True
        quantizer.write_grid(*grid_of_range(*quantizer.observer.range(), quantizer.spec))

    def _in_one_op(self, quantizer: "TensorQuantizer", x: Tensor, alone: bool) -> Tensor | None:
        spec, observer = quantizer.spec, quantizer.observer
        if not isinstance(observer, RangeObserver) or spec.format != "int":
            return None
        quantizer.ready = True
        return observer.observe_and_quantize(x, quantizer._scale, quantizer._zero_point, spec, alone)


class LSQ(QuantizerKind):
    """The scale is trained (LSQ, arXiv 1902.08153).

    It starts as in the paper where the spec's observer is the default, "minmax", and from the range of another observer.
    The parameter is the ratio of the scale to its start (see `qtoolkit.ops.positive_scale`): the scale stays positive, and
    SGD trains it as in the paper.
    """

    label = "lsq"

    def check(self, spec: "QuantSpec") -> None:
        """Raise ValueError for a spec that restricts the scale's values."""
        if spec.format != "int":
            raise ValueError(f"QuantSpec: format={spec.format!r} needs quantizer='fixed', got {spec.quantizer!r}.")
        if spec.pow2_scale:
            raise ValueError(
                f"QuantSpec: pow2_scale=True needs quantizer='fixed'; {spec.quantizer!r} trains scales of any value."
            )

    def observer_type(self, spec: "QuantSpec") -> type[Observer]:
        """Return the observer of the paper's start for "minmax"."""
        return LSQStartObserver if spec.observer == "minmax" else super().observer_type(spec)

    def tensors(self, spec: "QuantSpec", shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the start and the zero point as buffers, and the ratio as a parameter of at least one dimension."""
        ratio = nn.Parameter(torch.ones(shape or (1,), dtype=scale_dtype()))
        return {**super().tensors(spec, shape), "_relative_scale": ratio}

    def set_grid(self, quantizer: "TensorQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the scale as the start, and the zero point."""
        super().set_grid(quantizer, scale, zero_point)
        quantizer._relative_scale.fill_(1)

    def grid(self, quantizer: "TensorQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the trained scale, and the zero point."""
        return ops.positive_scale(quantizer._scale, quantizer._relative_scale), quantizer._zero_point

    def growth(self, quantizer: "TensorQuantizer") -> Tensor | None:
        """Return the magnitude of the ratio."""
        return quantizer._relative_scale.detach().abs()

    def upgrade(self, state: dict[str, Any], prefix: str) -> None:
        """Take the scale, which was the parameter, of either sign, as the start."""
        scale = state.get(prefix + "_scale")
        if scale is not None:
            state[prefix + "_scale"] = scale.abs()
            state.setdefault(prefix + "_relative_scale", torch.ones_like(scale).reshape(scale.shape or (1,)))

    def grad_factor(self, quantizer: "TensorQuantizer", x: Tensor) -> float:
        """Return 1 / sqrt(N * qmax), section 2.2 of the paper.

        N is the number of elements that share a scale: of all elements of a weight, or of the features of one sample of an
        activation. It does not depend on the batch size, and is at least 1.
        """
        spec = quantizer.spec
        sizes = x.shape
        if x.dim() > 1 and not quantizer.of_weight and not _differs_between_rows(spec, x.dim()):
            sizes = x.shape[1:]
        sharing = max(sizes.numel() // max(quantizer._scale.numel(), 1), 1)
        factor: float = float(sharing * spec.qmax) ** -0.5
        return factor


def _differs_between_rows(spec: "QuantSpec", dims: int) -> bool:
    """Return whether the scale of a tensor with this number of dimensions differs along dimension 0."""
    return spec.axis is not None and (spec.axis % dims == 0 or spec.group_size is not None)


QUANTIZERS: dict[str, QuantizerKind] = {"fixed": FixedScale(), "lsq": LSQ()}
OBSERVERS: dict[str, type[Observer]] = {
    "minmax": RangeObserver,
    "moving_average": MovingAverageObserver,
    "clip_std": ClipStdObserver,
    "lsq": LSQStartObserver,
    "histogram": HistogramObserver,
    "moving_histogram": MovingHistogramObserver,
    "pow2": Pow2Observer,
    "pow2_mode": Pow2ModeObserver,
}
