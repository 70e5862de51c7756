"""Weights that oscillate between two quantized values in training: a dampening loss, and freezing (arXiv 2203.11086)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.errors import check_known, check_whole
from qtoolkit.model_state import check_module
from qtoolkit.tuning.oscillations.code_tracks import LayerOscillation, Oscillations, Track
from qtoolkit.tuning.oscillations.grid_weights import GridWeight, shared_variances, weights_on_grids
from qtoolkit.tuning.rounding.grids import codes_on_grid

MOST_BITS = 16


class OscillationDampening:
    """A loss that pulls each weight to its quantized value, so that it does not oscillate between two of them.

    loss = coefficient * sum over layers and output channels of mean((clip(w, lowest, highest) - Q(w))^2)

    (M. Nagel et al., arXiv 2203.11086, section 4; the authors' code takes the mean over the elements of an output channel.)
    Q(w) and the range of the grid are constants: the gradient goes to the weights, and weights outside the range get no
    gradient. If a linked batch norm multiplies w by a factor before quantization, the grid of the product is divided by the
    factor.

    The coefficient rises along a cosine from 0 at step `begin` to `largest` at step `total_steps`. Call `step()` after each
    step of the optimizer. Disabled quantizers add nothing.

    Args:
        model: A prepared or replaced model, optionally in DistributedDataParallel or torch.compile.
        total_steps: The number of training steps.
        largest: The coefficient at the end.
        begin: The step at which the coefficient begins to rise; the paper's authors take a quarter of `total_steps`.

    Attributes:
        steps: The number of steps taken.
        skipped: The reasons for skipped weights, by quantizer name.

    Raises:
        TypeError: The model is not a module, or a value is not a number.
        ValueError: A value is out of range, or no weight of the model has an integer grid.

    Example:
        >>> w3 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=3, axis=0, quantizer="lsq")))
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)).train(), qconfig_mapping=w3, backend="tensorrt")
        >>> optimizer = torch.optim.SGD(qt.parameter_groups(prepared), lr=0.1)
        >>> dampening = qt.tuning.OscillationDampening(prepared, total_steps=20)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     loss = prepared(torch.randn(16, 8)).square().mean() + dampening()
        ...     loss.backward()
        ...     optimizer.step()
        ...     dampening.step()
        >>> dampening
        OscillationDampening(step 10 of 20: coefficient 0.05, weights: 1)
    """

    def __init__(self, model: nn.Module, total_steps: int, largest: float = 0.1, begin: int = 0) -> None:
        name = type(self).__name__
        check_module(model, name)
        _check_steps(name, total_steps, begin)
        if not 0 <= _number(name, "largest", largest) < math.inf:
            raise ValueError(f"{name}: largest must be at least 0 and finite, got {largest}.")
        self.total_steps, self.largest, self.begin = total_steps, largest, begin
        self.steps = 0
        self._weights, self.skipped = weights_on_grids(model, MOST_BITS, name)

    @property
    def coefficient(self) -> float:
        """The coefficient of the current step."""
        return _annealed(0.0, self.largest, self.begin, self.total_steps, self.steps)

    def __call__(self) -> Tensor:
        """Return the loss, 0-d: for the current weights, on the grids of the current step's forward."""
        active = [weight for weight in self._weights.values() if weight.active]
        means = [weight.error().square().sum() / weight.per_channel for weight in active]
        if not means:
            return next(iter(self._weights.values())).parameter.new_zeros(())
        return self.coefficient * torch.stack(means).sum()

    def step(self) -> None:
        """Count a step of the optimizer."""
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a state of `state_dict`."""
        self.steps = int(state["steps"])

    def __repr__(self) -> str:
        at = f"step {self.steps} of {self.total_steps}"
        return f"OscillationDampening({at}: coefficient {self.coefficient:.3g}, weights: {len(self._weights)})"


class OscillationFreezing:
    """Freeze each weight that oscillates between two quantized values, at its most frequent value.

    After each step of the optimizer, for the integer q of each weight (M. Nagel et al., arXiv 2203.11086, section 4):

    - A weight turns if q changes in the opposite direction of its last change. Its frequency is the moving average of turns,
      f <- momentum * turns + (1 - momentum) * f.
    - A weight with f above the threshold is frozen for the rest of the training, at the rounded moving average of q. So that
      the first values do not dominate this average in a short training, it is the mean over all steps for the first 1 /
      momentum steps, and it is rounded to one of the two values of the last change.
    - A frozen weight is set to its quantized value after each step, on the grid of the next forward. It does not contribute to
      the gradient of a learned scale. With a linked batch norm the grid is in units of the weight: its scales follow each
      change of the batch norm's factor, so a frozen weight does not move with the statistics.

    The threshold falls along a cosine from the first to the second of `thresholds`, from step `begin` to step `total_steps`;
    before `begin` nothing is frozen. From `begin` on, the ranges of these weights are frozen (see `qtoolkit.freeze_ranges`),
    because a frozen weight may determine the range; learned scales continue to train. Weights with a linked batch norm are
    skipped (with the reason in `skipped`) if their scale cannot follow the factor of each output channel: per-tensor scales,
    and powers of two.

    The integers are computed as in the next forward: from the weight times the factor of a linked batch norm. A disabled
    quantizer is ignored until it is enabled. In a process group every rank must call `step()`.

    Args:
        model: A prepared or replaced model, optionally in DistributedDataParallel or torch.compile.
        total_steps: The number of training steps.
        thresholds: The threshold at the beginning and at the end, in turns per step; the default is the paper's for MobileNetV2
            in 4 bits. None only tracks, for `report()`.
        momentum: Momentum of the moving averages; below the thresholds, so that a single flip does not freeze a weight.
        begin: The step from which weights are frozen; the paper's authors take a quarter of `total_steps`.
        max_bits: Weights with more bits are skipped.

    Attributes:
        steps: The number of steps taken.
        skipped: The reasons for skipped weights, by quantizer name.

    Raises:
        TypeError: The model is not a module, or a value is not a number.
        ValueError: A value is out of range, or no weight of the model has an integer grid of at most `max_bits`.

    Example:
        >>> w4 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=4)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False)).train()
        >>> model = qt.quant_modules.replace(model, w4, backend="tensorrt")
        >>> weight = torch.nn.init.constant_(model.get_parameter("0.weight"), 2.05)
        >>> model.get_submodule("0.weight_quantizer").amax = 7.0  # the step is 1
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> freezing = qt.tuning.OscillationFreezing(model, total_steps=60)
        >>> codes = []
        >>> for _ in range(60):
        ...     optimizer.zero_grad()
        ...     (model(torch.ones(1, 1)) - 2.3).square().sum().backward()  # the best weight is between two codes
        ...     optimizer.step()
        ...     freezing.step()
        ...     codes.append(round(weight.item()))
        >>> codes[10:20], codes[-10:]
        ([3, 2, 2, 2, 3, 2, 2, 3, 2, 2], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
        >>> print(freezing.report())
        after 60 steps: 0.00 % of 1 weights oscillate, 100.00 % are frozen
        weight    elements  oscillate  frozen
        0.weight  1         0.00 %     100.00 %
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int,
        thresholds: tuple[float, float] | None = (0.1, 0.01),
        momentum: float = 0.001,
        begin: int = 0,
        max_bits: int = 4,
    ) -> None:
        name = type(self).__name__
        check_module(model, name)
        _check_steps(name, total_steps, begin)
        if not 0 < _number(name, "momentum", momentum) < 1:
            raise ValueError(f"{name}: momentum must be between 0 and 1, got {momentum}.")
        _check_thresholds(name, thresholds, momentum)
        check_whole(name, "max_bits", max_bits, 2)
        self.total_steps, self.thresholds, self.momentum, self.begin = total_steps, thresholds, momentum, begin
        self.steps = 0
        self._weights, self.skipped = weights_on_grids(model, max_bits, name, in_units=thresholds is not None)
        self._tracks: dict[str, Track] = {}

    @property
    def threshold(self) -> float | None:
        """The threshold of the current step; None if nothing is frozen."""
        if self.thresholds is None or self.steps < self.begin:
            return None
        return _annealed(*self.thresholds, self.begin, self.total_steps, self.steps)

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of the optimizer; track the integers, and set the frozen weights."""
        self.steps += 1
        variances = shared_variances(list(self._weights.values()))
        for (name, weight), variance in zip(self._weights.items(), variances, strict=True):
            if weight.active:
                self._track(name, weight, weight.rescale_to_bn_factor(variance))

    def _track(self, name: str, weight: GridWeight, factor: Tensor | None) -> None:
        quantized = weight.scaled(weight.parameter, factor)
        weight.take_range(quantized)
        codes = codes_on_grid(weight.quantizer, quantized)
        if name not in self._tracks:
            self._tracks[name] = Track.of(codes)
        track, threshold = self._tracks[name], self.threshold
        track.follow(codes, self.momentum)
        if threshold is not None:
            weight.quantizer.following = False  # a frozen weight that gives the range would change all codes
            track.freeze(threshold)
            weight.store(track.codes, track.frozen, factor)

    def report(self) -> Oscillations:
        """Return the shares of oscillating and of frozen weights. Synchronizes with the device."""
        layers = tuple(LayerOscillation.of(name, track) for name, track in self._tracks.items())
        off = {name: "it is not quantized yet" for name in self._weights if name not in self._tracks}
        return Oscillations(self.steps, layers, {**off, **self.skipped})

    def state_dict(self) -> dict[str, object]:
        """Return the number of steps, and the track of each weight."""
        return {"steps": self.steps, "weights": {name: dict(vars(track)) for name, track in self._tracks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`; load the model's own state dict first.

        Raises:
            ValueError: The state belongs to another model.
        """
        tracks = {}
        for name, known in state["weights"].items():
            check_known("weight in the state of OscillationFreezing", name, self._weights)
            weight = self._weights[name].parameter
            tracks[name] = Track(**known).to(weight.device)
            if tracks[name].codes.shape != weight.shape:
                raise ValueError(
                    f"OscillationFreezing: the state belongs to another model: its {name!r} has shape "
                    f"{tuple(tracks[name].codes.shape)}, but this model's has {tuple(weight.shape)}."
                )
        self.steps, self._tracks = int(state["steps"]), tracks

    def __repr__(self) -> str:
        at = f"step {self.steps} of {self.total_steps}"
        does = "freezes nothing" if self.threshold is None else f"freezes above {self.threshold:.3g}"
        return f"OscillationFreezing({at}: {does}, weights: {len(self._weights)})"


def _annealed(start: float, end: float, begin: int, total_steps: int, steps: int) -> float:
    """Return the value at a step of a cosine from `start` at `begin` to `end` at `total_steps`."""
    share = min(max((steps - begin) / (total_steps - begin), 0.0), 1.0)
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _check_steps(what: str, total_steps: object, begin: object) -> None:
    total, first = check_whole(what, "total_steps", total_steps, 1), check_whole(what, "begin", begin, 0)
    if first >= total:
        raise ValueError(f"{what}: begin must be less than total_steps={total}, got {first}.")


def _number(what: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}: {name} must be a number, got {value!r}.")
    return value


def _check_thresholds(what: str, thresholds: object, momentum: float) -> None:
    if thresholds is None:
        return
    if not isinstance(thresholds, tuple | list) or len(thresholds) != 2:
        raise TypeError(f"{what}: thresholds must be two numbers, such as (0.1, 0.01), or None, got {thresholds!r}.")
    first, last = (_number(what, "each of thresholds", value) for value in thresholds)
    if not last <= first <= 1:
        raise ValueError(f"{what}: thresholds must decrease, from at most 1, got {thresholds!r}.")
    if not last > momentum:
        raise ValueError(
            f"{what}: thresholds must be above momentum={momentum}, or a single flip would freeze a weight, got "
            f"{thresholds!r}; lower momentum, or raise the thresholds."
        )
