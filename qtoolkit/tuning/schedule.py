"""QuantizationSchedule: which phase of quantization-aware training a model is in, counted in steps of the optimizer."""

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
    """Observe, quantize, freeze the ranges, freeze the batch norms: each from a step of the optimizer on.

    Call `step()` after each step of the optimizer, as for a learning rate, and before averages are updated. A phase that begins
    at step n holds for the forward after n steps.

    - The first `observe` steps train the float model; in the last 20 of them all quantizers observe, without what they have
      observed before. Then the ranges are set, of weights by the weights as they are, and the model quantizes. In a
      process group the ranges of all ranks are merged: every rank must call `step()`. Data that a model sees in eval mode while
      it observes enters its ranges too. Quantizers that are off stay off.
    - From step `freeze_ranges` on, no range follows a weight and none observes (see `qtoolkit.freeze_ranges`). Learned scales
      train on.
    - From step `freeze_batch_norm` on, the batch norms keep their running statistics (see `qtoolkit.freeze_batch_norm`).

    Args:
        model: A prepared or replaced model, or one that contains it, also in DistributedDataParallel.
        observe: The number of steps in float. 0 takes the ranges that the model has, of `qtoolkit.calibrate`.
        freeze_ranges: The step from which ranges are frozen; None never freezes them.
        freeze_batch_norm: The step from which batch norms are frozen; None never freezes them.
        averages: Copies of the model, such as torch.optim.swa_utils.AveragedModel, that change their phase with it.

    Warns:
        UserWarning: The model has no batch norm to freeze.

    Raises:
        TypeError: A model is not a module, or a step is not a whole number.
        ValueError: A step is negative, ranges are to be frozen before there are any, the model has no quantizers, or a model
            in `averages` is not a copy of it.

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
                f"QuantizationSchedule: freeze_ranges={freeze_ranges} must not come before the ranges exist; the first "
                f"observe={observe} steps find them. Set freeze_ranges to at least {observe}."
            )
        self.model, self.averages = model, tuple(averages)
        self.observe, self.freeze_ranges, self.freeze_batch_norm = observe, freeze_ranges, freeze_batch_norm
        self.steps = 0
        self._check_models()
        self._off = [not quantizer.active for quantizer in quantizers_of(model).values()]
        self._begin_phases()

    @property
    def observing(self) -> bool:
        """Whether the model is still in float, and observes, or will."""
        return self.steps < self.observe

    def step(self) -> None:
        """Count a step of the optimizer, and change the phase where one begins.

        Raises:
            ValueError: The steps in float are over, and a quantizer has observed NaN or infinities.
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
        """Return the number of steps and, while the model observes, what its quantizers have observed."""
        quantizers = quantizers_of(self.model) if self.observing else {}
        return {"steps": self.steps, "observed": {name: q.observer.state() for name, q in quantizers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`: load the model's and its averages' own state dicts first.

        The steps at which phases begin stay this schedule's.

        Raises:
            ValueError: The state is of another model.
        """
        quantizers = quantizers_of(self.model)
        observed = state["observed"]
        if observed and observed.keys() != quantizers.keys():
            (name, *_) = sorted(observed.keys() ^ quantizers.keys())
            raise ValueError(
                f"QuantizationSchedule: the state is of another model: only one of both has the quantizer {name!r}."
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
        then = ", ".join(f"{what} at step {begin}" for begin, what in coming) or "nothing changes any more"
        return f"QuantizationSchedule(step {self.steps}: {', '.join(now)}; next: {then})"

    def _check_models(self) -> None:
        models = (self.model, *self.averages)
        for model in models:
            check_module(model, "QuantizationSchedule")
        if not quantizers_of(self.model):
            refuse_foreign_quantizers(self.model, "QuantizationSchedule")
            raise ValueError(
                "QuantizationSchedule: the model has no quantizers to switch; pass what qtoolkit.prepare or "
                "qtoolkit.quant_modules.replace returned. A converted model is not trained."
            )
        specs = [[quantizer.spec for quantizer in quantizers_of(model).values()] for model in models]
        if any(of != specs[0] for of in specs[1:]):
            raise ValueError(
                "QuantizationSchedule: each of averages must be a copy of the model, such as "
                "torch.optim.swa_utils.AveragedModel(model); the quantizers of one differ from those of the model."
            )
        if self.freeze_batch_norm is not None and not has_linked(self.model):
            warn(f"QuantizationSchedule: freeze_batch_norm={self.freeze_batch_norm}, but {NONE_LINKED}")

    @property
    def _first_observed(self) -> int:
        return max(0, self.observe - OBSERVED_STEPS)

    def _begin_phases(self) -> None:
        """Do what is due after the present number of steps."""
        if self.observing and self.steps == self._first_observed:
            for quantizer in quantizers_of(self.model).values():
                quantizer.observer.reset()
        if self.steps in (0, self._first_observed, self.observe, self.freeze_ranges, self.freeze_batch_norm):
            self._set_modes()

    def _set_modes(self) -> None:
        """Give all models the modes of the present phase."""
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
