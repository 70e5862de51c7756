"""Statistics of quantizers in sampled training steps, accumulated on their device without synchronization."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.errors import shown
from qtoolkit.processes import own_part
from qtoolkit.quantizers.clip_range import clip_range
from qtoolkit.quantizers.observers import RangeObserver
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.running import running

WIDEST = 16  # bits of the grids whose codes are counted
SCALARS = ("lowest", "highest", "grid_lowest", "grid_highest", "clipped")  # of an Activity, which a writer gets


@dataclass(frozen=True)
class Activity:
    """Statistics of one quantizer in the sampled steps.

    Attributes:
        name: The quantizer's dotted name.
        spec: Its spec in short form.
        calls: The number of sampled forwards. The values below are None if they do not exist.
        lowest: The lowest input value.
        highest: The highest input value.
        grid_lowest: The lowest value of its grid in the latest sampled call, over all channels.
        grid_highest: The highest value of its grid.
        clipped: The share of clipped values, which have zero gradient; for integer grids of at most 16 bits.
        levels: The share of the grid's integers that occurred, in any channel; for integer grids of at most 16 bits.
        gradient: The mean norm of the gradient of its output.
        scale_gradient: The mean norm of the gradient of its learned scale and zero point, as seen by the optimizer.
        nonfinite: The number of sampled calls with NaN or infinite inputs.
    """

    name: str
    spec: str
    calls: int
    lowest: float | None
    highest: float | None
    grid_lowest: float | None
    grid_highest: float | None
    clipped: float | None
    levels: float | None
    gradient: float | None
    scale_gradient: float | None
    nonfinite: int


class Hook:
    """A hook on a module that calls a function. In copies and pickles of the module it does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self.function = function

    def __call__(self, *args: object) -> None:
        """Call the function, except during compilation."""
        if self.function is not None and not running().compiled:
            self.function(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return Hook, ()


class Recorder:
    """Accumulates statistics of a quantizer; reading synchronizes with the device. `places` counts calls of a model."""

    def __init__(self, name: str, quantizer: TensorQuantizer, places: Iterator[int]) -> None:
        self.name, self.quantizer = name, quantizer
        self.place, self._places = math.inf, places
        self.reset()

    def reset(self) -> None:
        """Clear the statistics."""
        self.calls = 0
        self.range = RangeObserver(QuantSpec())
        self.grid: Tensor | None = None
        self.codes = _CodeCounts(self.quantizer)
        self.gradient, self.scale_gradient = _MeanNorm(), _MeanNorm()

    def hear(self, quantizer: TensorQuantizer, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook: record a call in training; for a recomputation, only the gradient."""
        if quantizer.training and not running().recomputes:
            self._take(args[0].detach())
        if quantizer.training and output.requires_grad:
            output.register_hook(lambda gradient: self.gradient.add([gradient]))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, x: Tensor) -> None:
        self.place = min(self.place, next(self._places))
        self.calls += 1
        self.range.to(x.device)(x)
        self.codes.add(x)
        if self.quantizer.ready:
            low, high = clip_range(self.quantizer)
            self.grid = torch.stack([low.min(), high.max()])

    def take_scale_gradient(self, factor: Tensor | None) -> None:
        """Record the gradients of the quantizer's parameters, which are multiplied by this loss scale."""
        gradients = [p.grad for p in self.quantizer.parameters() if p.grad is not None]
        if gradients:
            self.scale_gradient.add(gradients, factor)

    def read(self) -> Activity:
        """Return the accumulated statistics."""
        seen = self.calls > 0 and bool(self.range.lo <= self.range.hi)
        lowest, highest = (float(self.range.lo), float(self.range.hi)) if seen else (None, None)
        low, high = (None, None) if self.grid is None else self.grid.tolist()
        values = lowest, highest, low, high
        norms = self.gradient.read(), self.scale_gradient.read()
        spec, nonfinite = self.quantizer.spec.describe(), int(self.range.skipped)
        return Activity(self.name, spec, self.calls, *values, *self.codes.shares(), *norms, nonfinite)


class _MeanNorm:
    """The mean over calls of the norm of some tensors; calls with non-finite norms, as under a GradScaler, are skipped."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), torch.zeros((), dtype=torch.int32)

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor], factor: Tensor | None = None) -> None:
        """Record the norm of tensors, as one vector, divided by the factor; skip NaN and infinity."""
        norms = [_norm(values_of(tensor)) for tensor in tensors]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        norm = norm if factor is None else norm / factor
        finite = torch.isfinite(norm)
        self.total = self.total.to(norm.device) + torch.where(finite, norm, 0)
        self.count = self.count.to(norm.device) + finite

    def read(self) -> float | None:
        """Return the mean of the norms; None without norms."""
        count = int(self.count)
        return float(self.total) / count if count else None


def _norm(x: Tensor) -> Tensor:
    """Return the norm of x in float32, summed in float32 at least."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.float()


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a gradient or a parameter: stored values of a sparse tensor, the local shard of a sharded one."""
    local = own_part(tensor)
    values: Tensor = local.coalesce().values() if local.is_sparse else local
    return values


class _CodeCounts:
    """Histogram of the integers of a grid, with the number of clipped values on each side.

    Clipped values count as qmin - 1 and qmax + 1. The integers, shifted to start at 0, go to an integer histogram, which needs
    no synchronization with the device.
    """

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer
        self.counts: Tensor | None = None
        self.bounds: tuple[Tensor, Tensor]

    def add(self, x: Tensor) -> None:
        """Count the quantized values of a tensor, if the quantizer has an integer grid of at most WIDEST bits."""
        quantizer, spec, known = self.quantizer, self.quantizer.spec, self.quantizer.capability_now
        if known.bits is None or known.bits > WIDEST or not known.direct:
            return
        if self.counts is None or self.counts.device != x.device:
            self.counts = torch.zeros(2 << spec.bits, dtype=torch.int64, device=x.device)
            self.bounds = (torch.zeros((), device=x.device), torch.zeros((), device=x.device))
        lowest, highest = spec.qmin - 1, spec.qmax + 1
        dtype = torch.int16 if spec.bits < WIDEST else torch.int32
        channels = (spec.axis, quantizer.group, spec.block_size)
        codes = ops.quantize(x, quantizer.scale, quantizer.zero_point, lowest, highest, *channels, dtype)
        ops.observe_histogram_(codes.float().sub_(lowest), self.counts, *self.bounds)

    def shares(self) -> tuple[float | None, float | None]:
        """Return the share of clipped values, and the share of the grid's integers that occurred."""
        spec = self.quantizer.spec
        if self.counts is None or not bool(self.counts.any()):
            return None, None
        width = float(self.bounds[1]) / self.counts.numel()  # a power of two, at most 1
        levels = spec.qmax - spec.qmin + 1
        counts = torch.zeros(levels + 2, dtype=torch.int64)
        filled = self.counts.cpu()[:: round(1 / width)][: levels + 2]
        counts[: filled.numel()] = filled
        clipped = float((counts[0] + counts[-1]) / counts.sum())
        counts[1] += counts[0]
        counts[-2] += counts[-1]
        return clipped, float((counts[1:-1] > 0).sum()) / levels


# ---- for TensorBoard, or any object with the same two methods


@runtime_checkable
class SummaryWriter(Protocol):
    """The methods of `torch.utils.tensorboard.SummaryWriter` that a watch needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write a number for a step."""

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> object:
        """Write the distribution of numbers for a step."""


def check_writer(writer: object) -> None:
    """Raise TypeError unless the object has a writer's methods."""
    if writer is not None and (isinstance(writer, type) or not isinstance(writer, SummaryWriter)):
        raise TypeError(
            "watch: writer must have the methods add_scalar and add_histogram, like torch.utils.tensorboard.SummaryWriter(), "
            f"or be None, got {shown(writer)}."
        )


def write(writer: SummaryWriter, row: Activity, quantizer: TensorQuantizer, step: int) -> None:
    """Write the inputs of a quantizer in a step, and its scale; several scales as a distribution."""
    if not row.calls:
        return
    for what in SCALARS:
        value = getattr(row, what)
        if value is not None:
            writer.add_scalar(f"{what}/{row.name}", value, step)
    if not quantizer.ready or quantizer.dynamic:
        return
    scale = quantizer.scale.detach()
    if scale.numel() == 1:
        writer.add_scalar(f"scale/{row.name}", float(scale), step)
    else:
        writer.add_histogram(f"scale/{row.name}", scale.float().cpu(), step)
