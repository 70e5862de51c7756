"""What all calibrators have: a place for what they collect, and a range made from it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Axis = int | Sequence[int] | None


class _Calibrator:
    """A collector of magnitudes; to be subclassed.

    Args:
        num_bits: Bits of a code, or (4, 3) for the float format.
        axis: Axes that keep their own range; None for one range.
        unsigned: Whether codes begin at 0.
    """

    def __init__(self, num_bits: int | tuple[int, int], axis: Axis, unsigned: bool) -> None:
        self._num_bits, self._axis, self._unsigned = num_bits, axis, unsigned

    def collect(self, x: Tensor) -> None:
        """Take in the values of x."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was collected."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the largest magnitude to quantize; None where nothing was collected."""
        raise NotImplementedError

    def kept_axes(self, x: Tensor) -> tuple[int, ...]:
        """Return the axes of x that keep their own range, counted from the first."""
        axes = () if self._axis is None else (self._axis,) if isinstance(self._axis, int) else self._axis
        return tuple(sorted({axis % x.dim() for axis in axes}))

    def check_finite(self, x: Tensor) -> None:
        """Raise ValueError where x has NaN or infinities. Waits for the device."""
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{type(self).__name__}: the values to calibrate with must be finite, got NaN or infinities; look for the "
                f"layer before this quantizer that makes them."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_bits={self._num_bits}, axis={self._axis}, unsigned={self._unsigned})"
