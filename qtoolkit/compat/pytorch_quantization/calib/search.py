"""The candidates and scores by which pytorch-quantization chooses a range from a histogram."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtoolkit.compat.pytorch_quantization.tensor_quant import fake_tensor_quant, scaled_e4m3

NumBits = int | tuple[int, int]
Array = np.ndarray[Any, Any]


def _check_start_bin(bins: int, last: int, start_bin: int) -> None:
    if not 0 < start_bin <= last:
        raise ValueError(
            f"start_bin must lie in [1, {last}] for a histogram of {bins} bins, got {start_bin}; take a smaller start_bin, or "
            f"more bins (num_bins)."
        )


def by_entropy(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, stride: int, start_bin: int) -> float:
    """Return the last of the edges with the least KL divergence between the clipped histogram and its quantized form.

    With `i` bins inside: P is these bins, with all counts beyond added to the last one. Q is the same bins mapped uniformly
    to 2^(num_bits - 1 + unsigned) levels, a level's counts spread evenly over its bins that are not empty. The first bin,
    where zeros are, takes the second one's count.
    """
    if not isinstance(num_bits, int):
        raise TypeError(f"entropy needs codes of whole bits, got num_bits={num_bits}; take mse, percentile or max.")
    bins = counts.cpu().numpy().astype(np.float64)
    _check_start_bin(len(bins), len(bins), start_bin)
    bins[:1] = bins[1:2] if len(bins) > 1 else bins[:1]
    levels = 1 << (num_bits - 1 + int(unsigned))
    candidates = range(start_bin, len(bins) + 1, stride)
    scores = np.array([_divergence(bins, i, levels) for i in candidates])
    last_best = len(scores) - 1 - int(np.argmin(scores[::-1]))
    return float(edges[candidates[last_best]])


def _divergence(bins: Array, i: int, levels: int) -> float:
    inside = bins[:i]
    full = inside > 0
    level = np.searchsorted(np.linspace(0, i, levels + 1), np.arange(i), "right") - 1
    totals = np.bincount(level[full], inside[full], levels)
    members = np.maximum(np.bincount(level[full], minlength=levels), 1)
    q = np.where(full, (totals / members)[level], 0.0)
    p = inside.copy()
    p[-1] += bins[i:].sum()
    if q.sum() == 0 or (p[~full] > 0).any():
        return float("inf")
    p, q = p[full] / p.sum(), q[full] / q.sum()
    return float((p * np.log(p / q)).sum())


def by_mse(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, stride: int, start_bin: int) -> float:
    """Return the first of the bins' centers with the least squared error of all centers, by their counts."""
    edges = edges.to(torch.float32)
    centers = (edges[1:] + edges[:-1]) / 2
    _check_start_bin(len(centers), len(centers) - 1, start_bin)
    candidates = range(start_bin, len(centers), stride)
    rounded = (_rounded(centers, centers[i], num_bits, unsigned) for i in candidates)
    scores = [(counts * (values - centers).double().square()).mean() for values in rounded]
    return float(centers[candidates[int(torch.stack(scores).cpu().numpy().argmin())]])


def _rounded(x: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool) -> Tensor:
    return (
        scaled_e4m3(x, amax, *num_bits)
        if isinstance(num_bits, tuple)
        else fake_tensor_quant(x, amax, num_bits, unsigned)
    )


def by_percentile(counts: Tensor, edges: Tensor, num_bits: NumBits, unsigned: bool, percentile: float) -> float:
    """Return the left edge of the first bin up to which there is at least that share of the values."""
    if not 0 <= percentile <= 100:
        raise ValueError(f"Invalid percentile. Must be in range 0 <= percentile <= 100, got {percentile}.")
    shares = counts.cpu().numpy().cumsum() / int(counts.sum())
    return float(edges[int(np.searchsorted(shares, percentile / 100))])
