"""Charts as SVG paths: the histogram of a tensor with the range of its grid, and the channels of a weight with their ranges."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qtoolkit.debug.page.facts import Values, ends_of, known_range
from qtoolkit.quantizers.quantizer import Quantizer

WIDTH, HEIGHT = 256, 72  # of the drawing, in units that the page scales
BARS = 64  # of a histogram: each is as wide as four units
COLUMNS = 128  # of a weight's chart: more channels share a column


@dataclass(frozen=True)
class Histogram:
    """The histogram of an activation quantizer's inputs."""

    inside: str  # the path of the bars of values that the grid represents
    outside: str  # the path of the bars of values beyond the range
    low: float | None  # where the grid begins, in units from the left; None without a grid
    high: float | None  # where it ends
    left: float  # the value at the left edge
    right: float  # the value at the right edge


def histogram_of(values: Values, quantizer: Quantizer) -> Histogram:
    """Return the histogram of a quantizer's inputs; heights are logarithms of counts."""
    observer, grid = values.histogram, ends_of(quantizer)
    shown = [*map(float, observer.observed()), *(grid or ())]
    left, right = min(shown), max(shown)
    margin = (right - left) * 0.02 or 1.0
    left, right = left - margin, right + margin
    counts = observer.counts.double().cpu()
    edges = torch.linspace(float(observer.lo), float(observer.hi), counts.numel() + 1, dtype=torch.float64)
    centers = (edges[1:] + edges[:-1]) / 2
    places = ((centers - left) / (right - left) * BARS).long().clamp(0, BARS - 1)
    beyond = torch.zeros_like(centers, dtype=torch.bool) if grid is None else (centers < grid[0]) | (centers > grid[1])
    within, outside = (torch.bincount(places, counts * keep, BARS) for keep in (~beyond, beyond))
    most = math.log1p(float((within + outside).max()))
    at = [None, None] if grid is None else [round((bound - left) / (right - left) * WIDTH, 1) for bound in grid]
    return Histogram(_bars(within, most), _bars(outside, most), at[0], at[1], left, right)


def _bars(counts: Tensor, most: float) -> str:
    width = WIDTH // BARS
    heights = [round(math.log1p(count) / most * (HEIGHT - 6)) if most else 0 for count in counts.tolist()]
    return "".join(
        f"M{i * width} {HEIGHT}v-{max(height, 1)}h{width - 1}v{max(height, 1)}z"
        for i, (height, count) in enumerate(zip(heights, counts.tolist(), strict=True))
        if count
    )


@dataclass(frozen=True)
class Channels:
    """The chart of a weight: one column per output channel, or per group of channels."""

    extent: str  # the path of the area between the lowest and the highest weight
    spread: str  # the path of the area within a standard deviation of the mean
    low: str  # the path of the lowest values of the grids; "" without a grid for each channel, or one for all
    high: str  # the path of the highest values
    zero: float  # where zero is, in units from above
    top: float  # the value at the upper edge; the lower edge has the same below zero
    channels: int  # the number of channels
    each: int  # the number of channels in a column


def channels_of(weight: Tensor, axis: int, quantizer: Quantizer) -> Channels:
    """Return the chart of a weight with channels along `axis`."""
    rows = weight.detach().movedim(axis, 0).flatten(1).float()
    lowest, highest = rows.amin(1), rows.amax(1)
    mean = rows.mean(1)
    deviation = (rows - mean.unsqueeze(1)).square().mean(1).sqrt()
    each = -(-rows.size(0) // COLUMNS)
    known = known_range(quantizer)
    fits = known is not None and known[0].numel() in (1, rows.size(0)) and bool(torch.isfinite(known[1]).all())
    grids = [bound.flatten().expand(rows.size(0)).float() for bound in known] if known is not None and fits else []
    top = max(float(end.abs().max()) for end in (lowest, highest, *grids)) * 1.05 or 1.0
    area = [_columns(end, each, reduce, top) for end, reduce in ((lowest, "amin"), (highest, "amax"))]
    core = [_columns(end, each, "mean", top) for end in (mean - deviation, mean + deviation)]
    lines = [_columns(end, each, reduce, top) for end, reduce in zip(grids, ("amin", "amax"), strict=False)]
    low, high = (_steps(line) for line in lines) if lines else ("", "")
    return Channels(_area(*area), _area(*core), low, high, HEIGHT / 2, top, rows.size(0), each)


def _columns(values: Tensor, each: int, reduce: str, top: float) -> list[float]:
    """Return the height of each column, in units from the top."""
    found = [getattr(part, reduce)() for part in torch.split(values.cpu(), each)]
    return [round(HEIGHT / 2 * (1 - float(value) / top), 1) for value in found]


def _steps(heights: list[float]) -> str:
    """Return the path of a step line, from left to right."""
    return f"M0 {heights[0]:g}" + _run(heights)


def _run(heights: list[float]) -> str:
    """Return a path through columns of equal width, starting at the left edge at the first height."""
    width = WIDTH / len(heights)
    return "".join(f"V{height:g}H{(i + 1) * width:.4g}" for i, height in enumerate(heights))


def _area(low: list[float], high: list[float]) -> str:
    """Return the path of the area between two step lines."""
    width = WIDTH / len(low)
    back = "".join(f"V{low[i]:g}H{i * width:.4g}" for i in reversed(range(len(low))))
    return f"M0 {high[0]:g}{_run(high)}{back}z"
