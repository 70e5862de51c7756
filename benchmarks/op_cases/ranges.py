"""Observers, histograms, and the search for the range to quantize."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.ao.quantization import observer as torch_ao

from benchmarks.measure import ROOF, Case
from benchmarks.op_cases.subjects import QMAX, QMIN, Subject
from qtoolkit import QuantSpec, ops
from qtoolkit.quantizers.observers import HistogramObserver

BINS = 2048
METHODS = ("percentile", "mse", "l2", "entropy")
SPEC = QuantSpec(observer="histogram", observer_args={"bins": BINS})


def _torch_ao_minmax(t: Subject) -> nn.Module:
    if t.axis is None:
        return torch_ao.MinMaxObserver().to(t.x.device)
    return torch_ao.PerChannelMinMaxObserver(ch_axis=t.axis).to(t.x.device)


def minmax_cases(subjects: Mapping[str, Subject]) -> Iterator[Case]:
    for name, t in subjects.items():
        lo, hi = torch.full_like(t.scale, torch.inf), torch.full_like(t.scale, -torch.inf)
        work = {
            ROOF: t.x.aminmax,
            "ours, minmax": partial(ops.minmax, t.x, t.axis),
            "ours, observe": partial(ops.observe_minmax_, t.x, lo, hi, axis=t.axis),
            "torch.ao MinMaxObserver": partial(_torch_ao_minmax(t), t.x),
        }
        yield Case("min/max observers (roof: torch.aminmax)", name, work, "1.1 per tensor, 1.4 per channel")


def histogram_cases(subjects: Mapping[str, Tensor]) -> Iterator[Case]:
    for name, values in subjects.items():
        work = {
            ROOF: values.aminmax,
            **_ours(values),
            "torch.histc": partial(torch.histc, values, BINS),
            "torch.ao HistogramObserver": partial(torch_ao.HistogramObserver(bins=BINS).to(values.device), values),
        }
        yield Case(f"histogram of {BINS} bins (roof: torch.aminmax)", name, work, "2.5, with the MSE range 3")


def _ours(x: Tensor) -> dict[str, Callable[[], object]]:
    observer = HistogramObserver(SPEC).to(x.device)

    def observe_and_search() -> object:
        observer(x)
        return observer.range()

    return {"ours": partial(observer, x), "ours, with MSE search": observe_and_search}


def search_case() -> Case:
    x = torch.randn(1 << 20)
    ours, rival = HistogramObserver(SPEC), torch_ao.HistogramObserver(bins=BINS)
    ours(x)
    rival(x)
    state = (ours.counts, ours.lo, ours.hi, QMIN, QMAX)
    work = {method: partial(ops.search_range, *state, method=method) for method in METHODS}
    work["torch.ao HistogramObserver (l2)"] = rival.calculate_qparams
    return Case(f"range search on {BINS} bins (roof: the goal of 2 ms)", "one tensor", work, "1", limit_us=2000)


def resnet50_weights() -> Iterator[Tensor]:
    """Random weights of the shapes of ResNet-50's convolutions and its linear layer (arXiv 1512.03385, table 1)."""
    shapes, channels = [(64, 3, 7, 7)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        shapes.append((4 * width, channels, 1, 1))  # the shortcut of the stage's first block
        for _ in range(blocks):
            shapes += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            channels = 4 * width
    for shape in [*shapes, (1000, channels)]:
        yield torch.randn(shape) * (2 / shape[0]) ** 0.5


def resnet_case() -> Case:
    weights = list(resnet50_weights())

    def search(bins: int) -> list[tuple[Tensor, Tensor]]:
        return [channel_ranges(weight, bins) for weight in weights]

    channels = sum(weight.size(0) for weight in weights)
    work = {f"{bins} bins": partial(search, bins) for bins in (BINS, 512)}
    name = f"ResNet-50: {len(weights)} weights, {channels:,} channels"
    return Case("per-channel MSE search (roof: the goal of 1 s)", name, work, "1", limit_us=1e6)


def channel_ranges(weight: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return the ranges of least squared error, one for each channel of axis 0."""
    counts = torch.zeros(weight.size(0), bins, dtype=torch.int64)
    lo, hi = torch.zeros(2, weight.size(0))
    ops.observe_histogram_(weight, counts, lo, hi, 0)
    return ops.search_range(counts, lo, hi, QMIN, QMAX, method="mse")
