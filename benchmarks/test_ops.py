"""The ops beside torch's and beside a copy of the same bytes: `pytest benchmarks/test_ops.py`.

benchmarks/pages/ops.py measures the same cases on more tensors, and writes benchmarks/results/ops.md.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import ROOF, Case
from benchmarks.op_cases.batch_norm import batch_norm_cases, max_pool_cases
from benchmarks.op_cases.fake_quant import backward_cases, forward_cases, learned_cases
from benchmarks.op_cases.integer_layer import Layer, integer_layer_case
from benchmarks.op_cases.ranges import histogram_cases, minmax_cases, search_case
from benchmarks.op_cases.subjects import Subject, image, observed, weight
from benchmarks.rows import Group, Settings
from benchmarks.tools import OURS, TORCH

OF_FAKE_QUANT = {"a copy": ROOF, "torch": "torch", "ours": "ours"}
OF_BATCH_NORM = {"a copy": ROOF, "torch, then ours": "torch batch_norm, relu; our fake_quant", "ours": "ours"}
OF_RANGES = {"torch.aminmax": ROOF, "ours": "ours, observe", "torch.ao": "torch.ao MinMaxObserver"}
OF_HISTOGRAM = {"torch.histc": "torch.histc", "ours": "ours", "torch.ao": "torch.ao HistogramObserver"}
OF_SEARCH = {
    "torch.ao, l2": "torch.ao HistogramObserver (l2)",
    **{f"ours, {m}": m for m in ("l2", "mse", "entropy", "percentile")},
}
OF_LAYER = {"torch, float": "torch", "ours, float": "ours, float", "ours, integer": "ours, integer"}


def activation(settings: Settings, axis: int | None = None) -> Subject:
    """12.8 M elements in full, else 6.4 M, which exceed the caches too: how long a copy takes in them differs by its place."""
    return Subject(image(settings.device, 64 if settings.full else 32), axis)


def shapes(settings: Settings) -> list[tuple[int, ...]]:
    return [(16 if settings.full else 8, 64, 112, 112)]


def of(cases: Iterable[Case], x: Tensor) -> Case:
    """Return the first case, whose pieces work on a tensor."""
    case = next(iter(cases))
    return replace(case, bytes=dict.fromkeys(case.work, lambda: x.numel() * x.element_size()))


def subject_group(
    rows: Mapping[str, str],
    cases: Callable[[Mapping[str, Subject]], Iterator[Case]],
    subject: Callable[[Settings], Subject],
) -> Group:
    def build(settings: Settings, _: Sequence[str]) -> Case:
        t = subject(settings)
        return of(cases({"x": t}), t.x)

    return Group(build, rows)


def image_group(rows: Mapping[str, str], cases: Callable[..., Iterator[Case]], number: int) -> Group:
    """Cases of a shape: the forward is the first, the backward the second."""

    def build(settings: Settings, _: Sequence[str]) -> Case:
        found = list(cases(settings.device, shapes(settings)))
        return of(found[number:], torch.empty(shapes(settings)[0]))

    return Group(build, rows)


def minmax(settings: Settings, _: Sequence[str]) -> Case:
    x = observed(settings.device, 64 if settings.full else 32)
    return of(minmax_cases({"x": Subject(x)}), x)


def histogram(settings: Settings, _: Sequence[str]) -> Case:
    x = observed(settings.device, 64 if settings.full else 32)
    return of(histogram_cases({"x": x}), x)


def search(settings: Settings, _: Sequence[str]) -> Case:
    return search_case()


def integer_layer(settings: Settings, _: Sequence[str]) -> Case:
    images, size = (8, 56) if settings.full else (2, 28)
    return integer_layer_case(settings.device, Layer(64, 64, 3), images, size)


TOOLS = [OURS, TORCH]
GROUPS = {
    "op: fake-quant, forward": subject_group(
        {**OF_FAKE_QUANT, "ours, without a mask": "ours, no mask"},
        lambda named: forward_cases(named, TOOLS),
        activation,
    ),
    "op: fake-quant, forward and backward": subject_group(
        OF_FAKE_QUANT, lambda named: backward_cases(named, TOOLS), activation
    ),
    "op: fake-quant per channel, forward and backward": subject_group(
        OF_FAKE_QUANT, lambda named: backward_cases(named, TOOLS), lambda settings: activation(settings, 1)
    ),
    "op: learned scale, forward and backward": subject_group(
        OF_FAKE_QUANT, lambda named: learned_cases(named, TOOLS), activation
    ),
    "op: weight with learned scales, forward and backward": subject_group(
        OF_FAKE_QUANT, lambda named: learned_cases(named, TOOLS), lambda settings: Subject(weight(settings.device), 0)
    ),
    "op: min/max observer": Group(minmax, OF_RANGES),
    "op: histogram observer": Group(histogram, OF_HISTOGRAM),
    "op: range search": Group(search, OF_SEARCH, on_cpu_alone="it reads a histogram of some thousand numbers."),
    "op: batch norm, ReLU, learned scale, forward": image_group(OF_BATCH_NORM, batch_norm_cases, 0),
    "op: batch norm, ReLU, learned scale, backward": image_group(OF_BATCH_NORM, batch_norm_cases, 1),
    "op: max pool, forward": image_group(OF_FAKE_QUANT, max_pool_cases, 0),
    "op: max pool, backward": image_group(OF_FAKE_QUANT, max_pool_cases, 1),
    "op: integer layer, forward and backward": Group(integer_layer, OF_LAYER),
}


def test_op(group: str, row: str, side_by_side: Callable[[str, str], None]) -> None:
    side_by_side(group, row)
