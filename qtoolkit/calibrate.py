"""Ranges from data: calibrate() runs the batches, and reports the quantizers that saw none; calibrating() takes a loop."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from qtoolkit.batches import Caller, check_batches, no_batch
from qtoolkit.eager.functions import WeightsTaken, sentence
from qtoolkit.eager.record import check_links, plan_of
from qtoolkit.errors import check_flags, check_known, check_whole, some, warn
from qtoolkit.foreign import refuse_foreign_quantizers
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.instead import RANGES, refuse_others
from qtoolkit.model_state import check_module, evaluating, unchanged_on_error
from qtoolkit.nn import QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import batch_statistics, values_of_channels
from qtoolkit.processes import from_all_ranks, ranks
from qtoolkit.progress import batches_of
from qtoolkit.quantizers.clip_range import clip_range, share_clipped
from qtoolkit.quantizers.first_steps import MUCH_CLIPPED, much_clipped
from qtoolkit.quantizers.float16_scales import warn_of_raised
from qtoolkit.quantizers.observers.histogram import METHODS
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.switches import Which, observe_ranges
from qtoolkit.quantizers.table import OBSERVERS
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of, take_names
from qtoolkit.report.lines import table

# With 8 values of a channel the outputs in eval mode lose 6 to 12 dB, with 16 at most 3, with 2 more than 20.
FEW_VALUES = 16


@dataclass(frozen=True)
class CalibrationReport:
    """The result of `calibrate`. It prints as a table.

    With several scales, a range reaches from the lowest bound of all to the highest.

    Attributes:
        batches: Batches that were run, in all processes.
        ranges: The range that each quantizer's observer chose. The grid covers it.
        unreached: Quantizers that saw no data. A layer without another activation quantizer becomes a float layer.
        observed: The lowest and highest value that each quantizer saw: exactly, to the width of a histogram's bin, or their
            moving averages.
        grids: The lowest and highest value that each quantizer represents.
        clipped: The share of the values beyond the grid by more than half a step; None where the observer cannot tell.
    """

    batches: int
    ranges: Mapping[str, tuple[float, float]]
    unreached: tuple[str, ...]
    observed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    grids: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    clipped: Mapping[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.batches} batches, {len(self.ranges)} quantizers calibrated, {len(self.unreached)} not reached"]
        rows: list[tuple[str, ...]] = [("quantizer", "observed", "grid", "clipped")]
        for name, share in self.clipped.items():
            clipped = "?" if share is None else f"{share:.3%}"
            rows.append((name, _interval(self.observed[name]), _interval(self.grids[name]), clipped))
        lines += table(rows)
        lines += [f"{name}: no data reached it" for name in self.unreached]
        return "\n".join(lines)


def _interval(bounds: tuple[float, float]) -> str:
    return f"[{bounds[0]:.6g}, {bounds[1]:.6g}]"


def calibrate(
    prepared: nn.Module,
    batches: Iterable[object],
    max_batches: int | None = None,
    forward: Callable[[nn.Module, Any], object] | None = None,
    progress: bool = True,
    synchronize: bool = True,
    method: str | None = None,
    **other: Never,
) -> CalibrationReport:
    """Observe the ranges of all quantizers on data, and set their scales. Then the model quantizes.

    The model runs without gradients, and its quantizers observe and do not quantize. It runs in eval mode, except that
    batch norms of a model in training mode normalize by the statistics of each batch, as they will in training (by the
    running ones where a batch has one value for each channel). Afterwards the model is in its own mode again, with its
    own statistics. In the training that follows, fixed ranges of activations follow the data for 200 steps
    (docs/training.md).

    Ranges by "minmax" and "histogram" do not depend on how the data is split into processes. Without batch norms in
    training mode they do not depend on the batches either. If torch.distributed is initialized, all ranks get the
    ranges of all data (for moving averages, the mean of their ranges). If anything raises, forward and the data
    included, all ranges, scales and observers are as before.

    Args:
        prepared: A model with quantizers, prepared, replaced or the user's own. If it is wrapped in
            DistributedDataParallel, the model inside is run.
        batches: Any iterable of batches. A batch is passed as model(*batch) if it is a tuple or list, model(**batch) if a
            mapping, else model(batch). Labels that the model's forward cannot take are left out, with a warning: the last item
            of a tuple or list, such as a data loader's (images, labels), or the entries of a mapping with the names of labels.
        max_batches: The number of batches to run; None runs all.
        forward: forward(model, batch), which calls the model, for other batches.
        progress: Show a progress bar.
        synchronize: In a process group, merge the ranges of all ranks; every rank must then call this. False merges nothing.
        method: How the ranges of all activations are chosen: an observer with its default options, such as "minmax" or
            "clip_std"; or from a histogram by "mse", "l2", "entropy" or "percentile" (99.99 %). A spec's `observer_args` take
            other options. The specs of their quantizers then say so. None follows the specs. Histograms count the values of
            padding like all others: pass batches without it, such as texts of about one length.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        The ranges, and the quantizers that saw no data.

    Warns:
        UserWarning: A range clips more than a few per cent of the values that its quantizer saw, labels are left out, or a
            batch norm in training mode has statistics of fewer than 16 values.

    Raises:
        ValueError: The model has no quantizer, there is no batch, the method is unknown or does not support a
            quantizer's format, a quantizer observed NaN or infinities, or a batch norm that is linked to a layer was
            removed from the model.
        TypeError: An argument is of a wrong type, or a batch does not match the signature of the model's forward.
        RuntimeError: No quantizer saw data, as where `forward` calls another model.

    Example:
        >>> import qtoolkit as qt
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")
        >>> report = qt.calibrate(prepared, [torch.ones(8, 4), 2 * torch.ones(8, 4)], progress=False)
        >>> report.ranges["activation_quantizers.input_1"]
        (1.0, 2.0)
    """
    refuse_others(calibrate, other)
    check_flags("calibrate", progress=progress, synchronize=synchronize)
    prepared = check_module(prepared, "calibrate", "prepared")  # DistributedDataParallel replaces ranges by rank 0's
    quantizers = quantizers_of(prepared)
    _check_any(prepared, quantizers, "calibrate")
    check_batches("calibrate", batches, forward)
    if max_batches is not None:
        check_whole("calibrate", "max_batches", max_batches, 1, " or None")
    check_links(prepared)
    run = forward or Caller("calibrate")
    count, taken = 0, WeightsTaken(prepared)
    with unchanged_on_error(nn.ModuleList(quantizers.values()), parameters=True):
        if method is not None:
            _observe_by(method, quantizers.values())
        weights = [quantizer for quantizer in quantizers.values() if quantizer.of_weight]
        with (
            torch.no_grad(),
            values_of_channels(prepared) as values,
            batch_statistics(prepared) as by_batch,
            evaluating(prepared),
            observe_ranges(prepared),
        ):
            for quantizer in quantizers.values():  # in eval mode, which takes the ranges of weights
                quantizer.observer.reset()
            for batch in batches_of("calibrate", batches, progress, max_batches):
                with nullcontext() if count else taken:
                    _run(run, prepared, batch, by_batch)
                for quantizer in weights:  # a weight is the same in each batch
                    quantizer.observing = quantizer.observing and not quantizer.observer.seen()
                count += 1
                if count == max_batches:
                    break
        if synchronize:
            count = merged_over_ranks(quantizers, count)
        if count == 0:
            raise no_batch("calibrate")
        remedy = "; forward(model, batch) must call the model that it gets" if forward is not None else ""
        remedy += f"; {sentence(taken.found)}".rstrip(".") if taken.found else ""
        _check_reached(quantizers, "calibrate", f"in {count} batches{remedy}")
        _warn_of_few_values(values)
        taken.note(prepared, "calibrate")
        return _finish(prepared, quantizers, count, "calibrate")


class calibrating(observe_ranges):  # noqa: N801 (used like torch.no_grad)
    """Observe ranges in your own loop without quantizing, and set the scales after the block, as `calibrate` does.

    The model runs in the mode that it is in, and with gradients unless `torch.no_grad` says otherwise. Observations
    from before the block do not count. If the block raises, all ranges, scales and observers are as before. In a
    process group every rank must leave the block, and all get the ranges of all data.

    As a plain call, or with `apply()`, it turns on observation alone, and sets no scales.

    Args:
        model: A prepared or replaced model, a submodule, or a quantizer.
        which: "all", "weights" or "activations".

    Warns:
        UserWarning: A quantizer saw no data in the block and has no range, a range clips much, or a function used the
            weight of a replaced layer without calling the layer.

    Raises:
        RuntimeError: No quantizer saw data in the block.
        ValueError: A quantizer observed NaN or infinities, `which` is unknown, or the model is converted or has no quantizers.

    Example:
        >>> import qtoolkit as qt
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt10")
        >>> with torch.no_grad(), calibrating(prepared):
        ...     for batch in (torch.ones(8, 4), 2 * torch.ones(8, 4)):
        ...         _ = prepared(batch)
        >>> prepared.get_submodule("activation_quantizers.input_1").amax
        tensor(2.)
    """

    _taken: WeightsTaken

    def __init__(self, model: nn.Module, which: Which = "all") -> None:
        super().__init__(model, which)
        self._model, self._blocks = check_module(model, "calibrating"), list[ExitStack]()
        self._observed = {n: q for n, q in self.quantizers.items() if isinstance(q, TensorQuantizer)}
        _check_any(model, self._observed, "calibrating")

    def __enter__(self) -> Self:
        super().__enter__()
        block = ExitStack()
        block.callback(super().__exit__, None, None, None)
        block.enter_context(unchanged_on_error(nn.ModuleList(self._observed.values()), parameters=True))
        self._taken = WeightsTaken(self._model)
        block.enter_context(self._taken)
        self._blocks.append(block)
        for quantizer in self._observed.values():
            quantizer.observer.reset()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = self._blocks.pop()
        if kind is not None:
            block.__exit__(kind, error, trace)
            return
        with block:
            count = merged_over_ranks(self._observed, 1)
            remedy = f"; {sentence(self._taken.found)}".rstrip(".") if self._taken.found else ""
            where = f"in the block; run batches through the model in it{remedy}"
            _check_reached(self._observed, "calibrating", where)
            self._taken.note(self._model, "calibrating")
            report = _finish(self._model, self._observed, count, "calibrating")
            _warn_of_unreached([name for name in report.unreached if not self._observed[name].ready])


def _check_any(model: nn.Module, quantizers: Collection[object], what: str) -> None:
    """Raise an error unless there are quantizers to observe with."""
    if not quantizers:
        refuse_foreign_quantizers(model, what)
        if named_quantizers(model):
            raise ValueError(
                f"{what}: a converted model has fixed scales; calibrate the prepared one, and convert it again."
            )
        cause = "; call qtoolkit.prepare or qtoolkit.quant_modules.replace first"
        if plan_of(model) is not None:
            cause = ": everything in it stays in float, and qtoolkit.quantization_report(model) says why"
        raise ValueError(f"{what}: the model has no quantizers{cause}.")


def _check_reached(quantizers: Mapping[str, TensorQuantizer], what: str, where: str) -> None:
    """Raise RuntimeError, which begins with `what`, if none of the quantizers saw data; `where` ends the sentence."""
    fixed = {name: quantizer for name, quantizer in quantizers.items() if not quantizer.dynamic}
    if fixed and not any(q.observer.seen() or not q.observer.finite() for q in fixed.values()):
        raise RuntimeError(f"{what}: no data reached the quantizers {some(list(map(repr, fixed)))} {where}.")


def _warn_of_unreached(names: Sequence[str]) -> None:
    if names:
        warn(
            f"calibrating: no data reached the quantizers {some(list(map(repr, names)))} in the block, so they have no "
            f"range; run data that reaches them, in eval mode for those that only eval mode uses.",
        )


def _observe_by(method: str, quantizers: Iterable[TensorQuantizer]) -> None:
    """Give the quantizers of activations the observer of a method."""
    check_known("method of calibrate", method, (*OBSERVERS, *METHODS), RANGES)
    name, options = (method, {}) if method in OBSERVERS else ("histogram", {"method": method})
    for quantizer in quantizers:
        if not quantizer.of_weight and not quantizer.dynamic:
            spec = replace(quantizer.spec, observer=name, observer_args=options)
            observer = OBSERVERS[name].from_spec(spec, tuple(quantizer.scale.shape), quantizer.group)
            quantizer.spec, quantizer.observer = spec, observer.to(quantizer.scale.device)


def merged_over_ranks(quantizers: Mapping[str, TensorQuantizer], count: int) -> int:
    """Merge the observations of all ranks on each rank, in a process group; return the number of batches on all ranks."""
    if ranks() == 1:
        return count
    mine = {name: quantizer.observer.state() for name, quantizer in quantizers.items()}
    gathered = from_all_ranks((count, mine))
    for name, quantizer in quantizers.items():
        quantizer.merge_observed([states[name] for _, states in gathered])
    return sum(each for each, _ in gathered)


def _finish(prepared: nn.Module, quantizers: Mapping[str, TensorQuantizer], count: int, what: str) -> CalibrationReport:
    loaded = load_ranges(prepared, quantizers)
    reached = {name: quantizers[name] for name in loaded}
    observed = {name: _whole(quantizer.observer.observed()) for name, quantizer in reached.items()}
    for module in prepared.modules():
        if isinstance(module, QuantWeighted):
            module.rescale_to_bn_factor()
    for quantizer in quantizers.values():
        quantizer.begin_steps(following=prepared.training)
    grids = {name: _whole(clip_range(quantizer)) for name, quantizer in reached.items()}
    clipped = {name: share_clipped(quantizer, quantizer.observer) for name, quantizer in reached.items()}
    ranges = {name: _whole(bounds) for name, bounds in loaded.items()}
    unreached = tuple(name for name, quantizer in quantizers.items() if name not in reached and not quantizer.dynamic)
    _warn_of_clipping(reached, clipped, what)
    warn_of_raised(reached, what)
    return CalibrationReport(count, ranges, unreached, observed, grids, clipped)


def load_ranges(prepared: nn.Module, quantizers: Mapping[str, TensorQuantizer]) -> dict[str, tuple[Tensor, Tensor]]:
    """Set the grids of these quantizers of a model from their observations; return the range of each that has some.

    The range of a weight is set even if no batch reached its layer. Learned scales of weights are trained at the rates
    of the weights as they are. NaN or infinities raise ValueError.
    """
    take_names(quantizers)
    reached = {n: q for n, q in quantizers.items() if q.observer.seen() or not q.observer.finite()}
    loaded = {name: quantizer.load_observed() for name, quantizer in reached.items()}
    chosen, calibrated = set(quantizers.values()), set(reached.values())
    for module in prepared.modules():
        if isinstance(module, QuantModule):
            own = module.weight_quantizers().values()
            if chosen.issuperset(own) and calibrated.isdisjoint(own):
                module.reset_weight_range()
        if isinstance(module, QuantModule | QuantizedGraphModule):
            module.set_weight_rates(calibrated)
    return loaded


def _run(run: Callable[..., object], model: nn.Module, batch: object, by_batch: Callable[[bool], None]) -> None:
    """Run a batch with its own statistics, or with the running ones where torch refuses one value for each channel."""
    by_batch(True)
    try:
        run(model, batch)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        by_batch(False)
        run(model, batch)


def _warn_of_few_values(values: Mapping[str, int]) -> None:
    """Warn of batch norms whose statistics are of so few values that the ranges after them differ from eval mode's."""
    few = [f"{name!r} ({count})" for name, count in values.items() if count < FEW_VALUES]
    if few:
        warn(
            f"calibrate: in training mode the batch norms {some(few)} normalize fewer than {FEW_VALUES} values of a channel "
            f"(batch size times height times width) by their own statistics; in eval mode the ranges after them differ. "
            f"Pass larger batches; or call prepared.eval() before calibrate, and prepared.train() after it.",
        )


def _warn_of_clipping(reached: Mapping[str, TensorQuantizer], clipped: Mapping[str, float | None], what: str) -> None:
    """Warn of ranges that clip more than a few per cent, unless a percentile asks for it or the spec has few bits."""
    much = [f"{name!r} ({share:.1%})" for name, share in clipped.items() if much_clipped(reached[name], share)]
    if much:
        warn(
            f"{what}: the ranges of {some(much)} clip more than {MUCH_CLIPPED:.0%} of the values; if the "
            f"accuracy is low, take another method of the observer 'histogram', such as 'mse', the observer 'minmax', or a "
            f"signed spec for values of both signs.",
        )


def _whole(bounds: tuple[Tensor, Tensor]) -> tuple[float, float]:
    return float(bounds[0].min()), float(bounds[1].max())
