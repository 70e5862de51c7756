"""A range chosen from a histogram of magnitudes, by entropy, squared error or percentile.

The formulas are pytorch-quantization's. `qtoolkit.ops.search_range` does the search by entropy. Counting and the other
searches differ from `qtoolkit.ops`:

- counting: the first tensor sets the width of the bins, and bins are appended; the native histogram has a fixed number of bins
  with a power-of-two width that doubles.
- mse: the candidates are the centers of the bins, rounded to float32, and values are rounded in float32 by `tensor_quant`'s
  multiplier. The native candidates are the edges of the bins, and its errors are computed in float64.
- percentile: the result is the left edge of a bin. The shares of the bins are added in float64 and compared without tolerance,
  so rounding errors decide if a share is met exactly. The native search interpolates within the bin, and allows for these
  errors.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit import ops
from qtoolkit.compat.pytorch_quantization.calib.calibrator import MaxCalibrator, _Calibrator, check_shape
from qtoolkit.compat.pytorch_quantization.reduction import Axis, kept_axes
from qtoolkit.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3
from qtoolkit.errors import warn

HISTC_EXACT = 1 << 24  # torch.histc counts in float32
ROWS = 256  # candidates that are scored together
CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NumBits = int | tuple[int, int]


class HistogramCalibrator(_Calibrator):
    """A running histogram of magnitudes, or one for each channel.

    The first tensor's histogram has `num_bins` bins from 0 to its largest magnitude. For larger magnitudes in later tensors,
    bins of the same width are appended. (pytorch-quantization does not support an axis, and with `torch_hist=False` it counts
    with NumPy, starting at the smallest magnitude of the first tensor; here `torch_hist` and `grow_method` only cause
    warnings.)

    Example:
        >>> calibrator = HistogramCalibrator(8, None, False, num_bins=4)
        >>> calibrator.collect(torch.tensor([0.5, -1.5, 2.0, 4.0]))
        >>> calibrator.compute_amax("percentile", percentile=75)
        tensor(2.)
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: Axis,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if grow_method is not None:
            warn(f"grow_method is deprecated and ignored, got {grow_method!r}.", DeprecationWarning)
        if not torch_hist:
            warn("HistogramCalibrator: torch_hist=False is ignored; torch counts, in bins from 0 on.")
        self._first_num_bins, self._skip_zeros = num_bins, skip_zeros
        self.reset()

    def reset(self) -> None:
        self._num_bins = self._first_num_bins
        self._calib_hist: Tensor | None = None
        self._calib_bin_edges: Tensor | None = None
        self._channels: list[HistogramCalibrator] = []
        self._amax_shape: list[int] = []

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Count the magnitudes of x. RuntimeError: the number of channels changes; ValueError: NaN or infinity."""
        self.check_finite(x)
        kept = kept_axes(self._axis, x.dim())
        if kept:
            self._collect_channels(x, kept)
            return
        values = x.detach().abs().flatten().to(torch.float32)
        values = values[values != 0] if self._skip_zeros else values
        if values.numel():
            self._count(values)

    def _collect_channels(self, x: Tensor, kept: tuple[int, ...]) -> None:
        shape = [size if axis in kept else 1 for axis, size in enumerate(x.shape)]
        rows = x.movedim(kept, tuple(range(len(kept)))).flatten(0, len(kept) - 1)
        if self._channels:
            check_shape(self._amax_shape, shape)
        else:
            self._channels, self._amax_shape = [self._for_one_channel() for _ in rows], shape
        for channel, row in zip(self._channels, rows, strict=True):
            channel.collect(row)

    def _for_one_channel(self) -> "HistogramCalibrator":
        channel = copy.copy(self)
        channel._axis = None
        channel.reset()
        return channel

    def _count(self, values: Tensor) -> None:
        largest, edges, old = float(values.max()), self._calib_bin_edges, self._calib_hist
        if edges is None or float(edges[-1]) == 0:  # only zeros so far: the width of a bin is not known yet
            edges = torch.linspace(0, largest, self._num_bins + 1, dtype=torch.float32, device=values.device)
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
        """Return the largest magnitude to quantize, 0-d or one a channel with x's dimensions; None if nothing was collected.

        The method is "percentile", which keeps this share of the values; or "entropy" or "mse", which try every `stride`-th bin
        from `start_bin` on. Raises TypeError: the method is unknown; ValueError: the percentile is out of range, or there are
        fewer bins than start_bin.
        """
        if method not in _SEARCHES:
            raise TypeError(f"Unknown calibration method {method!r}; it must be one of {', '.join(_SEARCHES)}.")
        if self._channels:
            amaxs = [
                channel.compute_amax(method, stride=stride, start_bin=start_bin, percentile=percentile)
                for channel in self._channels
            ]
            seen = [amax for amax in amaxs if amax is not None]
            full = [torch.zeros_like(seen[0]) if amax is None else amax for amax in amaxs] if seen else []
            return torch.stack(full).reshape(self._amax_shape) if seen else None
        counts, edges = self._calib_hist, self._calib_bin_edges
        if counts is None or edges is None:
            return None
        how = (percentile,) if method == "percentile" else (stride, start_bin)
        only_zeros = float(edges[-1]) == 0
        amax = 0.0 if only_zeros else _SEARCHES[method](counts, edges, self._num_bits, self._unsigned, *how)
        return torch.tensor(amax, dtype=torch.float32, device=counts.device)

    def __str__(self) -> str:
        edges = self._calib_bin_edges
        words = "None" if edges is None else f"[{float(edges[0]):.3f}, ..., {float(edges[-1]):.3f}]({len(edges)})"
        return f"HistogramCalibrator(calib_bin_edges={words})"


def _counts_of(values: Tensor, bins: int, end: float) -> Tensor:
    """Return the exact counts of values in equal bins over [0, end]."""
    if end == 0:
        return torch.bincount(values.long(), minlength=bins)
    inside = values.clamp(max=end)  # rounding may put the largest value beyond the last edge
    parts = [torch.histc(part, bins, 0, end).to(torch.int64) for part in torch.split(inside, HISTC_EXACT)]
    return torch.stack(parts).sum(0)


# ---- searches: each takes counts, edges of the bins, num_bits, unsigned and its options, and returns a magnitude


def by_entropy(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, stride: int, start_bin: int) -> float:
    """Return the last of the edges with the smallest KL divergence between the clipped histogram and its quantized form."""
    if not isinstance(num_bits, int):
        raise TypeError(f"entropy needs integers, got num_bits={num_bits}; use mse, percentile or max.")
    if num_bits == 1 and not unsigned:
        raise ValueError("entropy needs at least two levels, got num_bits=1 with signed integers; use unsigned=True.")
    candidates = _candidates(len(counts), len(counts), stride, start_bin).tolist()
    even = F.pad(counts.cpu(), (0, len(counts) % 2))  # an even number of bins of width 1, as search_range needs
    levels = min(1 << (num_bits - 1 + int(unsigned)), len(even))  # with more levels than bins, each bin is a level
    lo, hi = torch.zeros(1), torch.tensor([float(len(even))])
    _, chosen = ops.search_range(even, lo, hi, 0, levels - 1, "entropy", candidates=candidates)
    return float(edges[int(chosen)])


def by_mse(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, stride: int, start_bin: int) -> float:
    """Return the first of the bins' centers with the smallest squared error of all centers, weighted by their counts."""
    centers = (edges[1:] + edges[:-1]) / 2
    candidates = centers[_candidates(len(centers), len(centers) - 1, stride, start_bin)]
    parts = [_errors(centers, part[:, None], num_bits, unsigned) for part in torch.split(candidates, ROWS)]
    scores = torch.cat([(counts * part).mean(1) for part in parts])
    return float(candidates[int(scores.cpu().numpy().argmin())])


def _errors(x: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool) -> Tensor:
    """Return the squared error of each value (columns) for each amax (rows)."""
    rows = x.expand(amax.size(0), -1)
    if isinstance(num_bits, tuple):
        return (scaled_e4m3(rows, amax, *num_bits) - x).double().square()
    return (fake_tensor_quant(rows, amax, num_bits, unsigned) - x).double().square()


def by_percentile(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, percentile: float) -> float:
    """Return the left edge of the first bin up to which at least that share of the values lies."""
    if not 0 <= percentile <= 100:
        raise ValueError(f"Invalid percentile. Must be in range 0 <= percentile <= 100, got {percentile}.")
    values = counts.cpu().numpy()
    shares = np.cumsum(values / values.sum())
    return float(edges[int(np.searchsorted(shares, percentile / 100))])


_SEARCHES: dict[str, Callable[..., float]] = {"entropy": by_entropy, "mse": by_mse, "percentile": by_percentile}


def _candidates(bins: int, last: int, stride: int, start_bin: int) -> Tensor:
    if not 0 < start_bin <= last:
        raise ValueError(
            f"start_bin must lie in [1, {last}] for a histogram of {bins} bins, got {start_bin}; use a smaller start_bin, or "
            f"more bins (num_bins)."
        )
    return torch.arange(start_bin, last + 1, stride)


# ---- weights


def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the ranges of all weight quantizers from the weights, by the method "percentile", "mse" or "max".

    `perchannel` gives one range for each output channel: axis 1 of a transposed convolution, axis 0 of other layers. The other
    arguments, and errors, are as in `HistogramCalibrator` and `compute_amax`.
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
