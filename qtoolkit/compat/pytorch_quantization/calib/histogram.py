"""A range chosen from a histogram of magnitudes, by entropy, squared error or percentile."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.compat.pytorch_quantization.calib.calibrator import Axis, _Calibrator
from qtoolkit.compat.pytorch_quantization.calib.max import MaxCalibrator
from qtoolkit.compat.pytorch_quantization.calib.search import by_entropy, by_mse, by_percentile

HISTC_EXACT = 1 << 24  # torch.histc counts in float32
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class HistogramCalibrator(_Calibrator):
    """A running histogram of magnitudes, or one for each channel.

    The first tensor's histogram has `num_bins` bins from 0 to its largest magnitude. Where a later one has larger magnitudes,
    bins of the same width are added.

    Args:
        num_bits: Bits of a code.
        axis: Axes that keep their own range; None for one range. (In pytorch-quantization: None alone.)
        unsigned: Whether codes begin at 0.
        num_bins: Bins of the first histogram.
        grow_method: Deprecated, and without effect.
        skip_zeros: Do not count zeros.
        torch_hist: Kept for its place. (In pytorch-quantization, False counts with NumPy, and loses what is smaller than all
            that the first tensor has.)

    Example:
        >>> calibrator = HistogramCalibrator(8, None, False, num_bins=4)
        >>> calibrator.collect(torch.tensor([0.5, -1.5, 2.0, 4.0]))
        >>> calibrator.compute_amax("percentile", percentile=75)
        tensor(2.)
    """

    def __init__(
        self,
        num_bits: int | tuple[int, int],
        axis: Axis,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if grow_method is not None:
            warnings.warn(f"grow_method is deprecated and ignored, got {grow_method!r}.", DeprecationWarning, 2)
        self._first_num_bins = self._num_bins = num_bins
        self._skip_zeros, self._torch_hist = skip_zeros, torch_hist
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._num_bins = self._first_num_bins
        self._calib_hist: Tensor | None = None
        self._calib_bin_edges: Tensor | None = None
        self._channels: list[HistogramCalibrator] = []
        self._amax_shape: list[int] = []

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Count the magnitudes of x.

        Raises:
            RuntimeError: x has channels of another number than before.
            ValueError: x has NaN or infinities.
        """
        self.check_finite(x)
        kept = self.kept_axes(x)
        if kept:
            self._collect_channels(x, kept)
            return
        values = x.detach().abs().flatten().to(torch.float32)
        values = values[values != 0] if self._skip_zeros else values
        if values.numel():
            self._count(values)

    def _collect_channels(self, x: Tensor, kept: tuple[int, ...]) -> None:
        shape = [size if axis in kept else 1 for axis, size in enumerate(x.shape)]
        if self._channels and shape != self._amax_shape:
            raise RuntimeError(f"amax shape changed! It was {self._amax_shape}, got {shape}.")
        rows = x.movedim(kept, tuple(range(len(kept)))).flatten(0, len(kept) - 1)
        if not self._channels:
            self._channels, self._amax_shape = [self._of_one_channel() for _ in rows], shape
        for channel, row in zip(self._channels, rows, strict=True):
            channel.collect(row)

    def _of_one_channel(self) -> "HistogramCalibrator":
        how = (self._num_bits, None, self._unsigned, self._num_bins)
        return HistogramCalibrator(*how, skip_zeros=self._skip_zeros, torch_hist=self._torch_hist)

    def _count(self, values: Tensor) -> None:
        largest, edges = float(values.max()), self._calib_bin_edges
        old = self._calib_hist
        if edges is None or float(edges[-1]) == 0:  # nothing but zeros so far: there is no width yet
            edges = torch.linspace(0, largest, self._num_bins + 1, device=values.device)
        elif largest > float(edges[-1]):
            width = edges[1] - edges[0]
            self._num_bins = int((values.max() / width).ceil())
            steps = torch.arange(self._num_bins + 1, dtype=torch.float64, device=values.device)
            edges = (steps * width).to(torch.float32)
        counts = _counts_of(values, self._num_bins, float(edges[-1]))
        if old is not None:
            counts[: old.numel()] += old
        self._calib_hist, self._calib_bin_edges = counts, edges

    def compute_amax(
        self, method: str = "percentile", *, stride: int = 1, start_bin: int = 128, percentile: float = 99.99
    ) -> Tensor | None:
        """Return the magnitude that a method chooses.

        Args:
            method: "entropy", "mse" or "percentile".
            stride: Of "entropy" and "mse": bins from one candidate to the next.
            start_bin: Of "entropy" and "mse": the first candidate.
            percentile: Of "percentile": the share of the values to keep, in [0, 100].

        Returns:
            The magnitude, 0-d, or one a channel, with x's dimensions; None where nothing was collected.

        Raises:
            TypeError: The method is none of the three.
            ValueError: The percentile is out of range, or there are fewer bins than start_bin.
        """
        choices: dict[str, Any] = {
            "entropy": partial(by_entropy, stride=stride, start_bin=start_bin),
            "mse": partial(by_mse, stride=stride, start_bin=start_bin),
            "percentile": partial(by_percentile, percentile=percentile),
        }
        if method not in choices:
            raise TypeError(f"Unknown calibration method {method!r}; it must be one of {', '.join(choices)}.")
        if self._channels:
            options: Any = {"stride": stride, "start_bin": start_bin, "percentile": percentile}
            amaxs = [channel.compute_amax(method, **options) for channel in self._channels]
            seen = [amax for amax in amaxs if amax is not None]
            full = [seen[0].new_zeros(()) if amax is None else amax for amax in amaxs] if seen else []
            return torch.stack(full).reshape(self._amax_shape) if seen else None
        counts, edges = self._calib_hist, self._calib_bin_edges
        if counts is None or edges is None:
            return None
        nothing_but_zeros = float(edges[-1]) == 0
        amax: float = 0.0 if nothing_but_zeros else choices[method](counts, edges, self._num_bits, self._unsigned)
        return torch.tensor(amax, dtype=torch.float32, device=counts.device)

    def __str__(self) -> str:
        edges = self._calib_bin_edges
        words = "None" if edges is None else f"[{float(edges[0]):.3f}, ..., {float(edges[-1]):.3f}]({len(edges)})"
        return f"HistogramCalibrator(calib_bin_edges={words})"


def _counts_of(values: Tensor, bins: int, end: float) -> Tensor:
    """Return the counts of values in equal bins over [0, end], exactly."""
    if end == 0:
        counts = values.new_zeros(bins, dtype=torch.int64)
        counts[0] = values.numel()
        return counts
    inside = values.clamp(max=end)  # the largest may lie beyond the last edge by a rounding
    parts = [torch.histc(part, bins, 0, end).to(torch.int64) for part in torch.split(inside, HISTC_EXACT)]
    return torch.stack(parts).sum(0)


def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the ranges of all weight quantizers from the weights.

    Args:
        model: A model whose layers have `weight` and `weight_quantizer`.
        method: "percentile", "mse" or "max".
        perchannel: A range for each output channel: axis 1 of a transposed convolution, else axis 0.
        percentile: Of "percentile": the share of the values to keep, in [0, 100].
        num_bins: Bins of the histograms.

    Raises:
        TypeError: The method is none of the three.
        ValueError: The percentile is out of range.
    """
    if method not in ("percentile", "mse", "max"):
        raise TypeError(f"Unsupported calibration method {method!r} of weights; it must be percentile, mse or max.")
    for module in model.modules():
        weight, quantizer = getattr(module, "weight", None), getattr(module, "weight_quantizer", None)
        if isinstance(weight, Tensor) and quantizer is not None:
            axis = (1 if isinstance(module, CONV_TRANSPOSE) else 0) if perchannel else None
            quantizer.amax = _amax_of(weight, quantizer, axis, method, percentile, num_bins).cpu().numpy()


def _amax_of(weight: Tensor, quantizer: Any, axis: Axis, method: str, percentile: float, num_bins: int) -> Tensor:
    how = (quantizer.num_bits, axis, quantizer.unsigned)
    calibrator: _Calibrator = MaxCalibrator(*how) if method == "max" else HistogramCalibrator(*how, num_bins)
    calibrator.collect(weight)
    amax = calibrator.compute_amax() if method == "max" else calibrator.compute_amax(method, percentile=percentile)
    return torch.zeros(()) if amax is None else amax
