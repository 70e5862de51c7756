"""What piecewise linear activations compute, by the arguments that torch's ops take.

A function here gets `read`, which returns an argument of an op by its position, its name and its default, and returns the
`Bounds` of one kind of op. A bound that is not a number, because the model computes it, is NaN.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Read = Callable[[int, str, Any], Any]


class Bounds(NamedTuple):
    """A piecewise linear activation: v between the bounds, high above, low + slope * (v - low) below."""

    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0

    @property
    def known(self) -> bool:
        """Whether all of them are numbers."""
        return not any(map(math.isnan, self))


def relu(_: Read) -> Bounds:
    """Return the bounds of a ReLU."""
    return Bounds(0.0)


def relu6(_: Read) -> Bounds:
    """Return the bounds of a ReLU6."""
    return Bounds(0.0, 6.0)


def hardtanh(read: Read) -> Bounds:
    """Return the bounds of a hardtanh, by default -1 and 1."""
    return Bounds(_number(read(1, "min_val", -1.0), -math.inf), _number(read(2, "max_val", 1.0), math.inf))


def clamp(read: Read) -> Bounds:
    """Return the bounds of a clamp, infinite where it has none."""
    return Bounds(_number(read(1, "min", None), -math.inf), _number(read(2, "max", None), math.inf))


def leaky_relu(read: Read) -> Bounds:
    """Return the bounds of a leaky ReLU, whose slope is 0.01 by default."""
    return Bounds(0.0, slope=_number(read(1, "negative_slope", 0.01), 0.01))


def _number(value: Any, absent: float) -> float:
    if value is None:
        return absent
    return float(value) if isinstance(value, int | float) else math.nan
