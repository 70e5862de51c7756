"""Ranges that observe during training, kept equal on all processes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn

from qtoolkit.model_state import check_module
from qtoolkit.processes import ranks
from qtoolkit.quantizers.observers import EndsObserver
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of


@torch.no_grad()
def synchronize_ranges(model: nn.Module) -> None:
    """Give all ranks the ranges of all data, for the quantizers that observe while they train; every rank must call this.

    Call it every n steps, and before evaluation. A range of all inputs ("minmax") becomes the union of the ranks', a
    moving average the mean of theirs, and scales that follow a range are set from it. All ranges of a kind
    take one all-reduce, of three or four numbers each. Without a process group nothing happens.

    DistributedDataParallel replaces all buffers by rank 0's before each forward: with n = 1 nothing is lost. For n > 1
    pass `broadcast_buffers=False`, so that each rank keeps its own ranges in between.

    Args:
        model: A prepared or replaced model, also in DistributedDataParallel or fully_shard.

    Raises:
        TypeError: The model is not a module.
        ValueError: A quantizer that observes has an observer that accumulates its inputs, such as "histogram", and so cannot
            be merged several times; or it has a range for each channel, and no data has reached it.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).train(), backend="tensorrt")
        >>> _ = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> prepared.get_submodule("activation_quantizers.input_1").observing = True
        >>> for step in range(4):
        ...     _ = prepared(torch.rand(8, 4))
        ...     if step % 2 == 1:
        ...         qt.synchronize_ranges(prepared)
    """
    check_module(model, "synchronize_ranges")
    quantizers = {name: quantizer for name, quantizer in quantizers_of(model).items() if quantizer.observing}
    for name, quantizer in quantizers.items():
        _check(name, quantizer)
    share_ranges(quantizers.values())
    for quantizer in quantizers.values():
        if ranks() > 1 and quantizer.quantizing and quantizer.observer.seen():
            quantizer.kind.take_observed(quantizer)


def _check(name: str, quantizer: TensorQuantizer) -> None:
    observer = quantizer.observer
    if observer.ADDED_UP or not isinstance(observer, EndsObserver):
        raise ValueError(
            f"synchronize_ranges: quantizer {name!r} has the observer {quantizer.spec.observer!r}, which accumulates its input "
            f"and can be merged only once, as qtoolkit.calibrate does; take the observer 'moving_average' or 'minmax'."
        )


def share_ranges(quantizers: Iterable[TensorQuantizer]) -> None:
    """Merge the lowest and highest values on all ranks. Doing so again changes nothing, unlike sums."""
    found = [quantizer.observer for quantizer in quantizers if quantizer.observing]
    observers = [observer for observer in found if isinstance(observer, EndsObserver)]
    if ranks() == 1 or not observers:
        return
    _share_unions([observer for observer in observers if observer.momentum is None])
    _share_means([observer for observer in observers if observer.momentum is not None])


def _share_unions(observers: Sequence[EndsObserver]) -> None:
    rows = _reduced([(-each.lo, each.hi, each.skipped) for each in observers], distributed.ReduceOp.MAX)
    for observer, (lo, hi, skipped) in zip(observers, rows, strict=True):
        observer.lo.copy_(-lo)
        observer.hi.copy_(hi)
        observer.skipped.copy_(skipped)


def _share_means(observers: Sequence[EndsObserver]) -> None:
    own = []
    for each in observers:
        seen = ~(each.lo > each.hi)
        own.append((torch.where(seen, each.lo, 0), torch.where(seen, each.hi, 0), seen, each.skipped > 0))
    rows = _reduced(own, distributed.ReduceOp.SUM)
    for observer, (lo, hi, count, skipped) in zip(observers, rows, strict=True):
        observer.lo.copy_(torch.where(count > 0, lo / count, torch.inf))
        observer.hi.copy_(torch.where(count > 0, hi / count, -torch.inf))
        observer.skipped.copy_(torch.maximum(observer.skipped, skipped.clamp(max=1)))


def _reduced(rows: Sequence[Sequence[Tensor]], op: "distributed.ReduceOp.RedOpType") -> list[tuple[Tensor, ...]]:
    """Reduce tensors over the ranks in one operation, in float64, and return them in their shapes."""
    if not rows:
        return []
    flat = torch.cat([tensor.detach().double().reshape(-1) for row in rows for tensor in row])
    distributed.all_reduce(flat, op)
    parts = iter(torch.split(flat, [tensor.numel() for row in rows for tensor in row]))
    return [tuple(next(parts).reshape(tensor.shape) for tensor in row) for row in rows]
