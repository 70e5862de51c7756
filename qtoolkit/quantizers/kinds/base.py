"""QuantizerKind, the base class of quantizers; the base class of kinds that shape their input first; shared rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers import Observer
from qtoolkit.quantizers.spec_ops import fake_quant, range_of
from qtoolkit.quantizers.state import scale_dtype

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


@dataclass(frozen=True)
class Need:
    """A field of a spec that a quantizer needs to have a value, in a rule of a QConfigMapping against the backend's."""

    field: str
    value: Any
    refuse: Callable[[QuantSpec], NoReturn]  # raises ValueError for a spec with another value

    def check(self, spec: QuantSpec) -> None:
        """Raise ValueError for a spec with another value."""
        if getattr(spec, self.field) != self.value:
            self.refuse(spec)


def _refuse_format(spec: QuantSpec) -> NoReturn:
    raise ValueError(f"QuantSpec: format={spec.format!r} needs quantizer='fixed', got {spec.quantizer!r}.")


def _refuse_powers(spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"QuantSpec: pow2_scale=True needs quantizer='fixed' or 'tqt'; the scales of {spec.quantizer!r} have any value."
    )


def _refuse_zero_point(spec: QuantSpec) -> NoReturn:
    raise ValueError(
        f"QuantSpec: quantizer={spec.quantizer!r} has no zero point: it needs symmetric=True, got False; take 'lsq_plus' "
        f"or 'learned_range' for an affine grid."
    )


NEEDS_INTEGERS = Need("format", "int", _refuse_format)
NEEDS_ANY_SCALE = Need("pow2_scale", False, _refuse_powers)
NEEDS_NO_ZERO_POINT = Need("symmetric", True, _refuse_zero_point)


class QuantizerKind:
    """How a TensorQuantizer stores, initializes and trains its scale. The TensorQuantizer holds all state.

    This base class stores scale and zero point as buffers, initialized from the observed range.

    Attributes:
        label: Short name in reports; "" for none.
        OPTIONS: The options that `QuantSpec.quantizer_args` may hold, with their defaults.
        PLAIN: Whether `quantize` is `qtoolkit.ops.fake_quant` with `grid` and `grad_factor`, so that an op that computes more
            may do it in its place.
        LEARNED: Whether the range is trained.
        POWERS: Whether its scales are powers of two, also where the spec's pow2_scale is False.
        NEEDS: The values of fields without which it raises ValueError.
        KEEPS_SIZE: Whether quantized values are as large as the input. If not, a batch norm after a layer with such a weight
            is not folded into it: its scales would be lost.

    Example:
        >>> from qtoolkit.quantizers.table import QUANTIZERS
        >>> isinstance(QUANTIZERS["lsq"], QuantizerKind), QUANTIZERS["lsq"].LEARNED, QUANTIZERS["fixed"].LEARNED
        (True, True, False)
    """

    label: str = ""
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    PLAIN: ClassVar[bool] = True
    LEARNED: ClassVar[bool] = True
    POWERS: ClassVar[bool] = False
    KEEPS_SIZE: ClassVar[bool] = True
    NEEDS: ClassVar[tuple[Need, ...]] = ()

    def check(self, spec: QuantSpec) -> None:
        """Raise ValueError for a spec that this quantizer does not support, or for an option out of its range."""
        for need in self.NEEDS:
            need.check(spec)

    def most_bits(self, spec: QuantSpec) -> int:
        """Return the most bits that a spec may have which is otherwise like this one."""
        return 16

    def check_use(self, spec: QuantSpec, name: str, of_weight: bool) -> None:
        """Raise ValueError where it cannot quantize a weight, or an activation, of this spec."""

    def observer_type(self, spec: QuantSpec, of_weight: bool = False) -> type[Observer]:
        """Return the type of the observer of a spec, of a weight or an activation.

        Trained parameters start at the least squared error where the spec has the default, "minmax"; with groups, as in LSQ's
        paper. Nothing lies beyond the largest value, so a bound that starts there has no gradient and hardly moves.
        """
        from qtoolkit.quantizers.table import OBSERVERS  # beside the table of the subclasses of this class

        if not self.LEARNED or spec.observer != "minmax" or spec.format != "int":
            return OBSERVERS[spec.observer]
        if spec.group_size is not None:
            return OBSERVERS["lsq"]
        return OBSERVERS["moving_histogram" if of_weight else "histogram"]  # a weight is one tensor: no sum is kept

    def options(self, spec: QuantSpec) -> dict[str, Any]:
        """Return the value of each option."""
        return {**self.OPTIONS, **spec.quantizer_args}

    # ---- the grid

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return the trained parameters, by the names in the state dict, with the values before there is a range."""
        return {}

    def tensors(self, spec: QuantSpec, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return new buffers, and the `parameters`, named as in the state dict, each of the scale's shape.

        `_scale` and `_zero_point` are required. `_scale` is NaN while there is no range; `_zero_point` is None for a
        symmetric spec. Parameters have at least one dimension.
        """
        dtype, starts = scale_dtype(), self.parameters(spec).items()
        zero_point = None if spec.symmetric else torch.zeros(shape, dtype=dtype)
        trained = {name: nn.Parameter(torch.full(shape or (1,), start, dtype=dtype)) for name, start in starts}
        return {"_scale": torch.full(shape, torch.nan, dtype=dtype), "_zero_point": zero_point, **trained}

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the scale and the zero point of a range; called under torch.no_grad."""
        quantizer._scale.copy_(scale)
        if quantizer._zero_point is not None and zero_point is not None:
            quantizer._zero_point.copy_(zero_point)

    def set_weight_rate(self, quantizer: "RangedQuantizer", quantized: Tensor, trained: Tensor, sharing: int) -> None:
        """Set how fast a weight's scale is trained; called under torch.no_grad. By default there is nothing to set.

        The mean magnitudes, of the scale's shape, are of the quantized tensor and of the parameter, which a batch norm may
        multiply before. `sharing` is the number of elements that share a scale.
        """

    def load_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store a scale and zero point that `grid` once returned; called under torch.no_grad."""
        self.set_grid(quantizer, scale, zero_point)

    def grid(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the differentiable scale and zero point, as they are trained.

        Quantizing ops take `RangedQuantizer.grid`, whose scales are the target's. Ops use the scale's magnitude and the
        rounded zero point.
        """
        return quantizer._scale, quantizer._zero_point

    def start(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Return what an op makes the scale from: the scale itself, or the arguments of `qtoolkit.ops.positive_scale`.

        The op rounds it where the spec says so. None where `grid` computes it by other ops, or computes a zero point.
        """
        return None

    def grid_spec(self, spec: QuantSpec) -> QuantSpec:
        """Return the spec of the integer grid on which quantized values lie: by default the quantizer's own."""
        return spec

    def input_ends(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        """Return the lowest and highest input that is not clipped, of the scale's shape: by default the range of the grid."""
        return range_of(quantizer.spec, quantizer.scale, quantizer.zero_point)

    def shapes(self, spec: QuantSpec) -> bool:
        """Return whether the input is shaped before it is rounded to the grid."""
        return False

    def shape(self, quantizer: "RangedQuantizer") -> nn.Module:
        """Return a function that shapes the input, with the present parameters as constants, where `shapes` holds.

        A converted model keeps it before the quantizer. Its attribute `why_no_export`, a sentence, says why a file of ONNX
        cannot have it for an activation; None if it can.
        """
        raise NotImplementedError

    # ---- use

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Return x quantized with the present grid."""
        spec, grad_factor = quantizer.spec, self.grad_factor(quantizer, x)
        return fake_quant(spec, x, *quantizer.grid(), quantizer.group, spec.block_size, grad_factor)

    def grad_factor(self, quantizer: "RangedQuantizer", x: Tensor) -> float:
        """Return the factor of the gradients of scale and zero point, for the input x."""
        return 1.0

    def growth(self, quantizer: "RangedQuantizer") -> Tensor | None:
        """Return how many times their start the trained scales are; None where there is no start to compare with."""
        return None

    def observe(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        """Observe x while quantizing."""
        quantizer.observer(x)

    def average(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        """Take x into a moving average of ranges, where the range can follow."""
        raise NotImplementedError

    def take_observed(self, quantizer: "RangedQuantizer") -> None:
        """Set the scale from the observed range, where it follows that range."""

    def observe_and_quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Observe x, and return it quantized with the scale that then holds."""
        self.observe(quantizer, x)
        return quantizer.quantize(x)

    def follows(self, quantizer: "RangedQuantizer") -> bool:
        """Return whether the range can follow a tensor in training: `follow`, `follow_and_quantize` and `average`."""
        return False

    def follow(self, quantizer: "RangedQuantizer", x: Tensor) -> None:
        """Set the range to x's alone."""
        raise NotImplementedError

    def follow_and_quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Set the range to x's alone, and return x quantized with it."""
        self.follow(quantizer, x)
        return quantizer.quantize(x)


class Shape(nn.Module):
    """Shapes a tensor before it is rounded, with constants: the part of such a quantizer that a converted model keeps."""

    # why a file of ONNX cannot have it for an activation, a sentence; None if it can. A weight in a file is shaped already
    why_no_export: str | None = None


class Shaped(QuantizerKind):
    """The input is shaped, then rounded to a uniform grid."""

    PLAIN = False
    NEEDS = (NEEDS_INTEGERS, NEEDS_ANY_SCALE, NEEDS_NO_ZERO_POINT)

    def shapes(self, spec: QuantSpec) -> bool:
        return True
