"""The largest magnitude seen."""

import numpy as np
import torch
from torch import Tensor

from qtoolkit.compat.pytorch_quantization.calib.calibrator import Axis, _Calibrator
from qtoolkit.compat.pytorch_quantization.reduction import reduce_amax


class MaxCalibrator(_Calibrator):
    """The running maximum of magnitudes.

    Args:
        num_bits: Kept for its place.
        axis: Axes that keep their own range; None for one range.
        unsigned: Kept for its place.
        track_amax: Keep the magnitude of every tensor in `amaxs`.

    Example:
        >>> calibrator = MaxCalibrator(8, 0, False)
        >>> calibrator.collect(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
        >>> calibrator.compute_amax()
        tensor([[2.0000],
                [0.5000]])
    """

    def __init__(self, num_bits: int | tuple[int, int], axis: Axis, unsigned: bool, track_amax: bool = False) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[np.ndarray] = []
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[np.ndarray]:
        """The largest magnitudes of each tensor, where they are tracked."""
        return self._amaxs

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Take in the largest magnitudes of x.

        Raises:
            RuntimeError: x has channels of another number than before.
            ValueError: x has NaN or infinities.
        """
        kept = self.kept_axes(x)
        amax = reduce_amax(x, tuple(axis for axis in range(x.dim()) if axis not in kept))
        self.check_finite(amax)
        if self._calib_amax is None:
            self._calib_amax = amax.clone()
        elif amax.shape != self._calib_amax.shape:
            raise RuntimeError(f"amax shape changed! It was {list(self._calib_amax.shape)}, got {list(amax.shape)}.")
        else:
            self._calib_amax = torch.maximum(self._calib_amax, amax)
        if self._track_amax:
            self._amaxs.append(amax.float().cpu().numpy())

    def reset(self) -> None:
        """Forget the largest magnitudes."""
        self._calib_amax = None
        self._amaxs = []

    def compute_amax(self) -> Tensor | None:
        """Return the largest magnitudes; None where nothing was collected."""
        return self._calib_amax

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"
