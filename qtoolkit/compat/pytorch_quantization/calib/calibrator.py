"""The base class of calibrators, and the calibrator of the largest magnitude."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtoolkit.compat.pytorch_quantization.reduction import Axis, amax_along


class _Calibrator:
    """Base class that collects magnitudes and computes a range. Arguments as in `MaxCalibrator`."""

    def __init__(self, num_bits: int | tuple[int, int], axis: Axis, unsigned: bool) -> None:
        self._num_bits, self._axis, self._unsigned = num_bits, axis, unsigned

    def collect(self, x: Tensor) -> None:
        """Collect the values of x."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard the collected values."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the largest magnitude to quantize, or None if nothing was collected."""
        raise NotImplementedError

    def check_finite(self, x: Tensor) -> None:
        """Raise ValueError if x contains NaN or infinity. Synchronizes with the device."""
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{type(self).__name__}: the values to calibrate with must be finite, got NaN or infinities; find the layer "
                "before this quantizer that produces them."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_bits={self._num_bits}, axis={self._axis}, unsigned={self._unsigned})"


def check_shape(old: Sequence[int], new: Sequence[int]) -> None:
    """Raise RuntimeError if the shape of the ranges changes between tensors."""
    if list(old) != list(new):
        raise RuntimeError(f"amax shape changed! It was {list(old)}, got {list(new)}.")


class MaxCalibrator(_Calibrator):
    """The running maximum of magnitudes for each index of the axes; `track_amax` keeps each tensor's in `amaxs`.

    Example:
        >>> calibrator = MaxCalibrator(8, 0, False)
        >>> calibrator.collect(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
        >>> calibrator.compute_amax()
        tensor([[2.0000],
                [0.5000]])
    """

    _calib_amax: Tensor | None
    _amaxs: list[np.ndarray]

    def __init__(self, num_bits: int | tuple[int, int], axis: Axis, unsigned: bool, track_amax: bool = False) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self.reset()

    @property
    def amaxs(self) -> list[np.ndarray]:
        """The largest magnitudes of each tensor, if tracked."""
        return self._amaxs

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Update the maximum with the magnitudes of x. RuntimeError: the number of channels changes; ValueError: NaN."""
        amax = amax_along(x, self._axis)
        self.check_finite(amax)
        if self._track_amax:
            self._amaxs.append(amax.float().cpu().numpy())
        if self._calib_amax is not None:
            check_shape(self._calib_amax.shape, amax.shape)
            amax = torch.maximum(self._calib_amax, amax)
        self._calib_amax = amax

    def reset(self) -> None:
        self._calib_amax, self._amaxs = None, []

    def compute_amax(self) -> Tensor | None:
        return self._calib_amax

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"
