"""The observer of tensors whose range a target fixes."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.observers.minmax import EndsObserver


class ConstantRangeObserver(EndsObserver):
    """A range that is given: inputs do not change it. The report still has the lowest and highest input.

    Targets fix the grid of some ops' outputs, such as 1/256 with the zero point -128 of LiteRT's softmax.

    Example:
        >>> spec = qt.QuantSpec(symmetric=False, observer="constant", observer_args={"low": 0.0, "high": 255 / 256})
        >>> quantizer = qt.TensorQuantizer(spec)
        >>> with qt.calibrating(quantizer):
        ...     _ = quantizer(torch.tensor([0.1, 0.2]))
        >>> quantizer.scale * 256, quantizer.zero_point
        (tensor(1.), tensor(-128.))
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"low": -1.0, "high": 1.0}

    def __init__(self, spec: QuantSpec, shape: tuple[int, ...] = (), group: int = 1) -> None:
        super().__init__(spec, shape, group)
        self.low, self.high = self.options(spec).values()

    @classmethod
    def check(cls, spec: QuantSpec) -> None:
        low, high = cls.options(spec).values()
        numbers = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
        if not (numbers and low <= 0 <= high and low < high):
            raise ValueError(
                f"QuantSpec: the range of observer 'constant' must hold zero, with low below high, got low={low!r} and "
                f"high={high!r}."
            )

    def range(self) -> tuple[Tensor, Tensor]:
        return torch.full_like(self.lo, self.low), torch.full_like(self.hi, self.high)
