"""calibrate(): run data through a prepared model, set every range, and report the quantizers that saw no data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from tqdm import tqdm

from qtoolkit.eager.record import check_links
from qtoolkit.model_inputs import run_batch
from qtoolkit.model_state import check_module, evaluating, unchanged_on_error
from qtoolkit.nn import QuantModule
from qtoolkit.quantizers.quantizer import refuse_legacy_quantizers
from qtoolkit.quantizers.switches import calibrating
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of


@dataclass(frozen=True)
class CalibrationReport:
    """The result of `calibrate`. It prints as a table.

    Attributes:
        batches: Batches that were run, in all processes.
        ranges: The lowest and highest value of each quantizer's range.
        unreached: Quantizers that saw no data. Their layers cannot be converted.
    """

    batches: int
    ranges: Mapping[str, tuple[float, float]]
    unreached: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(name) for name in self.ranges), default=0)
        lines = [f"{self.batches} batches, {len(self.ranges)} quantizers calibrated, {len(self.unreached)} not reached"]
        lines += [f"{name.ljust(width)}  [{lo:.6g}, {hi:.6g}]" for name, (lo, hi) in self.ranges.items()]
        lines += [f"{name}: no data reached it" for name in self.unreached]
        return "\n".join(lines)


def calibrate(
    prepared: nn.Module,
    batches: Iterable[Any],
    max_batches: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: bool = True,
    synchronize: bool = True,
) -> CalibrationReport:
    """Observe the ranges of all quantizers on data, and set their scales. Then the model quantizes.

    The model runs in eval mode without gradients, and its quantizers observe and do not quantize. Afterwards it is in its own
    mode again. Ranges by "minmax" and "histogram" do not depend on how the data is split into batches, or into processes: if
    torch.distributed is initialized, all ranks get the ranges of all data (moving averages: their mean). If anything raises,
    forward and the data included, all ranges, scales and observers are as before.

    Args:
        prepared: A model with quantizers, prepared, replaced or the user's own.
        batches: Any iterable of batches. A batch is passed as model(*batch) if it is a tuple or list, model(**batch) if a
            mapping, else model(batch).
        max_batches: The number of batches to run; None runs all.
        forward: forward(model, batch), for other batches, such as a data loader's (images, labels).
        progress: Show a progress bar.
        synchronize: In a process group, merge the ranges of all ranks; every rank must then call this. False merges nothing.

    Returns:
        The ranges, and the quantizers that saw no data.

    Raises:
        ValueError: The model has no quantizer, there is no batch, a quantizer observed NaN or infinities, or a batch norm that
            is linked to a layer is no longer in the model.
        TypeError: An argument is of a wrong type, or a batch does not match the signature of the model's forward.

    Example:
        >>> import qtoolkit as qt
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)))
        >>> report = qt.calibrate(prepared, [torch.ones(8, 4), 2 * torch.ones(8, 4)], progress=False)
        >>> report.ranges["activation_quantizers.input_1"]
        (1.0, 2.0)
    """
    check_module(prepared, "calibrate", "prepared")
    quantizers = quantizers_of(prepared)
    if not quantizers:
        refuse_legacy_quantizers(prepared, "calibrate")
        raise ValueError(
            "calibrate: the model has no quantizers; call qtoolkit.prepare or qtoolkit.quant_modules.replace first."
        )
    _check(batches, max_batches, forward)
    check_links(prepared)
    run = forward or run_batch
    count = 0
    with unchanged_on_error(nn.ModuleList(quantizers.values()), parameters=True):
        for quantizer in quantizers.values():
            quantizer.observer.reset()
        with torch.no_grad(), evaluating(prepared), calibrating(prepared):
            for batch in tqdm(batches, desc="calibrate", total=max_batches, disable=not progress, leave=False):
                run(prepared, batch)
                count += 1
                if count == max_batches:
                    break
        if synchronize and distributed.is_available() and distributed.is_initialized():
            count = _share(quantizers, count)
        if count == 0:
            raise ValueError("calibrate: batches must hold at least one batch, got none.")
        return _finish(prepared, quantizers, count)


def _check(batches: object, max_batches: object, forward: object) -> None:
    if isinstance(batches, torch.Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibrate: batches must be an iterable of batches, such as a list, got {type(batches).__name__}."
        )
    if max_batches is not None and not isinstance(max_batches, int):
        raise TypeError(f"calibrate: max_batches must be a whole number or None, got {max_batches!r}.")
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"calibrate: max_batches must be at least 1 or None, got {max_batches}.")
    if forward is not None and not callable(forward):
        raise TypeError(f"calibrate: forward must be a function of a model and a batch, or None, got {forward!r}.")


def _share(quantizers: Mapping[str, TensorQuantizer], count: int) -> int:
    """Merge the observations of all ranks on each rank; return the number of batches on all ranks."""
    mine = {name: quantizer.observer.state() for name, quantizer in quantizers.items()}
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (count, mine))
    for name, quantizer in quantizers.items():
        quantizer.merge_observed([states[name] for _, states in gathered])
    return sum(each for each, _ in gathered)


def _finish(prepared: nn.Module, quantizers: Mapping[str, TensorQuantizer], count: int) -> CalibrationReport:
    for name, quantizer in quantizers.items():
        quantizer.name = name
    reached = {n: q for n, q in quantizers.items() if q.observer.seen() or not q.observer.finite()}
    for quantizer in reached.values():
        quantizer.check_observed()
    loaded = {name: quantizer.load_observed() for name, quantizer in reached.items()}
    observed = set(reached.values())
    for module in prepared.modules():
        if isinstance(module, QuantModule) and observed.isdisjoint(module.weight_quantizers().values()):
            module.reset_weight_range()  # a layer that no batch ran through has a weight too
    ranges = {name: (float(lo.min()), float(hi.max())) for name, (lo, hi) in loaded.items()}
    return CalibrationReport(count, ranges, tuple(n for n in quantizers if n not in reached))
