"""QuantizationSchedule: phases of quantization-aware training, counted in optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qtoolkit.calibrate import load_ranges, merged_over_ranks
from qtoolkit.errors import check_whole, warn
from qtoolkit.foreign import refuse_foreign_quantizers
from qtoolkit.model_state import check_module
from qtoolkit.nn import QuantModule, freeze_batch_norm
from qtoolkit.nn.batch_norm import NONE_LINKED, has_linked
from qtoolkit.quantizers.switches import freeze_ranges
from qtoolkit.quantizers.synchronize import share_ranges
from qtoolkit.quantizers.tensor_quantizer import quantizers_of

OBSERVED_STEPS = 20  # earlier ones have the values of another network, if weights were random


class QuantizationSchedule:
    """Observe, quantize, freeze the ranges, freeze the batch norms: each phase starts at a given optimizer step.

    Call `step()` after each step of the optimizer, like a learning rate scheduler, and before averages are updated. A phase
    that begins at step n applies to the forward after n steps.

    - The first `observe` steps train the float model; in the last 20 of them all quantizers observe, starting from empty
      observers. Then the ranges are set (weight ranges from the current weights), and the model quantizes. In a process group
      the ranges of all ranks are merged: every rank must call `step()`. While a model observes, data in eval mode also counts.
      Disabled quantizers stay disabled.
    - From step `freeze_ranges` on, ranges do not follow weights or observe (see `qtoolkit.freeze_ranges`). Learned scales
      continue to train.
    - From step `freeze_batch_norm` on, the batch norms keep their running statistics (see `qtoolkit.freeze_batch_norm`).

    Args:
        model: A prepared or replaced model, or a model that contains it, optionally in DistributedDataParallel.
        observe: The number of steps in float. 0 uses the existing ranges from `qtoolkit.calibrate`.
        freeze_ranges: The step from which ranges are frozen; None never freezes them.
        freeze_batch_norm: The step from which batch norms are frozen; None never freezes them.
        averages: Copies of the model, such as torch.optim.swa_utils.AveragedModel, that change phases together with it.

    Warns:
        UserWarning: The model has no batch norm to freeze.

    Raises:
        TypeError: A model is not a module, or a step is not a whole number.
        ValueError: A step is negative, ranges would be frozen before they exist, the model has no quantizers, or a model in
            `averages` is not a copy of it.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).train(), backend="tensorrt")
        >>> optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
        >>> schedule = qt.tuning.QuantizationSchedule(prepared, observe=2, freeze_ranges=4)
        >>> for _ in range(3):
        ...     prepared(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> schedule
        QuantizationSchedule(step 3: quantizes since step 2; next: freezes the ranges at step 4)
    """

    def __init__(
        self,
        model: nn.Module,
        observe: int = 0,
        freeze_ranges: int | None = None,
        freeze_batch_norm: int | None = None,
        averages: Sequence[nn.Module] = (),
    ) -> None:
        check_whole("QuantizationSchedule", "observe", observe, 0)
        for name, value in (("freeze_ranges", freeze_ranges), ("freeze_batch_norm", freeze_batch_norm)):
            if value is not None:
                check_whole("QuantizationSchedule", name, value, 0)
        if freeze_ranges is not None and freeze_ranges < observe:
            raise ValueError(
                f"QuantizationSchedule: freeze_ranges={freeze_ranges} must not come before the ranges exist, after "
                f"observe={observe} steps. Set freeze_ranges to at least {observe}."
            )
        self.model, self.averages = model, tuple(averages)
        self.observe, self.freeze_ranges, self.freeze_batch_norm = observe, freeze_ranges, freeze_batch_norm
        self.steps = 0
        self._check_models()
        self._off = [not quantizer.active for quantizer in quantizers_of(model).values()]
        self._begin_phases()

    @property
    def observing(self) -> bool:
        """Whether the model is still in float, before or during observation."""
        return self.steps < self.observe

    def step(self) -> None:
        """Count a step of the optimizer, and start the phases that are due.

        Raises:
            ValueError: At the end of the float steps, a quantizer has observed NaN or infinity.
        """
        self.steps += 1
        if self.steps <= self.observe:  # DistributedDataParallel gives all ranks the ranges of rank 0
            share_ranges(quantizers_of(self.model).values())
            if self.steps == self.observe:
                self._set_ranges()
            for average in self.averages:  # the first input may have given a quantizer its number of channels
                pairs = zip(quantizers_of(self.model).values(), quantizers_of(average).values(), strict=True)
                for quantizer, copied in pairs:
                    copied.load_state_dict(quantizer.state_dict())
        self._begin_phases()

    def state_dict(self) -> dict[str, object]:
        """Return the number of steps and, while the model observes, the state of its observers."""
        quantizers = quantizers_of(self.model) if self.observing else {}
        return {"steps": self.steps, "observed": {name: q.observer.state() for name, q in quantizers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`; load the state dicts of the model and its averages first.

        The start steps of the phases are this schedule's, not the state's.

        Raises:
            ValueError: The state belongs to another model.
        """
        quantizers = quantizers_of(self.model)
        observed = state["observed"]
        if observed and observed.keys() != quantizers.keys():
            (name, *_) = sorted(observed.keys() ^ quantizers.keys())
            raise ValueError(
                f"QuantizationSchedule: the state belongs to another model: only one of the two has the quantizer {name!r}."
            )
        self.steps = int(state["steps"])
        for name, seen in observed.items():
            quantizers[name].merge_observed([seen])
        self._set_modes()

    def __repr__(self) -> str:
        phases = (  # the step at which each begins, what holds from there on, and what happens there
            (self.observe, "quantizes", "quantizes"),
            (self.freeze_ranges, "ranges are frozen", "freezes the ranges"),
            (self.freeze_batch_norm, "batch norms are frozen", "freezes the batch norms"),
        )
        now = [f"in float for {self.observe} steps"] if self.observing else []
        now += [f"{holds} since step {begin}" for begin, holds, _ in phases if _begun(begin, self.steps)]
        coming = sorted((begin, what) for begin, _, what in phases if begin is not None and begin > self.steps)
        then = ", ".join(f"{what} at step {begin}" for begin, what in coming) or "no more changes"
        return f"QuantizationSchedule(step {self.steps}: {', '.join(now)}; next: {then})"

    def _check_models(self) -> None:
        models = (self.model, *self.averages)
        for model in models:
            check_module(model, "QuantizationSchedule")
        if not quantizers_of(self.model):
            refuse_foreign_quantizers(self.model, "QuantizationSchedule")
            raise ValueError(
                "QuantizationSchedule: the model has no quantizers to switch; pass the result of qtoolkit.prepare or "
                "qtoolkit.quant_modules.replace. A converted model is not trained."
            )
        specs = [[quantizer.spec for quantizer in quantizers_of(model).values()] for model in models]
        if any(of != specs[0] for of in specs[1:]):
            raise ValueError(
                "QuantizationSchedule: each of averages must be a copy of the model, such as "
                "torch.optim.swa_utils.AveragedModel(model); one of them has other quantizers than the model."
            )
        if self.freeze_batch_norm is not None and not has_linked(self.model):
            warn(f"QuantizationSchedule: freeze_batch_norm={self.freeze_batch_norm}, but {NONE_LINKED}")

    @property
    def _first_observed(self) -> int:
        return max(0, self.observe - OBSERVED_STEPS)

    def _begin_phases(self) -> None:
        """Start the phases that are due after the current number of steps."""
        if self.observing and self.steps == self._first_observed:
            for quantizer in quantizers_of(self.model).values():
                quantizer.observer.reset()
        if self.steps in (0, self._first_observed, self.observe, self.freeze_ranges, self.freeze_batch_norm):
            self._set_modes()

    def _set_modes(self) -> None:
        """Set the modes of the current phase in all models."""
        observes = self.observing and self.steps >= self._first_observed
        for model in (self.model, *self.averages):
            for quantizer, off in zip(quantizers_of(model).values(), self._off, strict=True):
                if self.observe and not off:
                    quantizer.observing, quantizer.quantizing = observes, not self.observing
            if _begun(self.freeze_ranges, self.steps):
                freeze_ranges(model).apply()
            if _begun(self.freeze_batch_norm, self.steps) and has_linked(model):
                freeze_batch_norm(model)

    @torch.no_grad()
    def _set_ranges(self) -> None:
        quantizers = quantizers_of(self.model)
        merged_over_ranks(quantizers, self.steps)
        load_ranges(self.model, quantizers)
        for module in self.model.modules():
            if isinstance(module, QuantModule):
                module.reset_weight_range()  # the weights have changed since their ranges were first observed


def _begun(begin: int | None, steps: int) -> bool:
    return begin is not None and begin <= steps
