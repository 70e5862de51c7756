"""Tracks of quantized weights over training steps: how often they turn, and which are frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtoolkit.report.lines import table

OSCILLATING = 0.005  # the frequency above which a weight counts as oscillating, in the paper's tables


@dataclass
class Track:
    """The track of a quantized weight. Its tensors have the weight's shape."""

    codes: Tensor  # the codes after the last step, int32; of a frozen weight those that it keeps
    direction: Tensor  # the sign of the last change of each code, int32; 0 before the first one
    frequency: Tensor  # the moving average of turns: changes against the last one. Float32
    average: Tensor  # the mean of the codes so far, and the moving average after 1 / momentum steps. Float32
    frozen: Tensor  # which weights are frozen
    steps: int = 0  # the number of steps so far

    @staticmethod
    def of(codes: Tensor) -> "Track":
        """Start with quantized integers."""
        zeros = torch.zeros_like(codes, dtype=torch.float32)
        return Track(codes, torch.zeros_like(codes), zeros, zeros, torch.zeros_like(codes, dtype=torch.bool))

    def to(self, device: torch.device) -> "Track":
        """Return the track with its tensors on a device."""
        codes, direction, frozen = (each.to(device) for each in (self.codes, self.direction, self.frozen))
        return Track(codes, direction, self.frequency.to(device), self.average.to(device), frozen, self.steps)

    def follow(self, codes: Tensor, momentum: float) -> None:
        """Record the integers after a step; frozen weights keep their values."""
        codes = torch.where(self.frozen, self.codes, codes)
        change = (codes - self.codes).sign()
        turned = change * self.direction < 0
        self.steps += 1
        self.frequency = self.frequency.lerp(turned.float(), momentum)
        self.average = self.average.lerp(codes.float(), max(momentum, 1 / self.steps))
        self.direction = torch.where(change == 0, self.direction, change)
        self.codes = codes

    def freeze(self, threshold: float) -> None:
        """Freeze the weights above a threshold, each at the value of its last change that is nearer to the average."""
        fresh = (self.frequency > threshold) & ~self.frozen
        before = self.codes - self.direction
        nearer = torch.where((self.average - before).abs() < (self.average - self.codes).abs(), before, self.codes)
        self.codes, self.frozen = torch.where(fresh, nearer, self.codes), self.frozen | fresh


@dataclass(frozen=True)
class LayerOscillation:
    """The shares of oscillating and of frozen weights of a parameter.

    Attributes:
        name: The dotted name of the parameter.
        weights: The number of its elements.
        oscillating: The share of weights that are not frozen and turn in more than 0.5 % of the steps, by the moving average.
        frozen: The share of frozen weights.
    """

    name: str
    weights: int
    oscillating: float
    frozen: float

    @staticmethod
    def of(name: str, track: Track) -> "LayerOscillation":
        """Return the shares of a track."""
        oscillating = (track.frequency > OSCILLATING) & ~track.frozen
        return LayerOscillation(
            name, track.codes.numel(), float(oscillating.float().mean()), float(track.frozen.float().mean())
        )

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line in a table."""
        return self.name, str(self.weights), _percent(self.oscillating), _percent(self.frozen)


@dataclass(frozen=True)
class Oscillations:
    """The result of `OscillationFreezing.report`. It prints as a table.

    Attributes:
        steps: The number of steps taken.
        layers: The shares of each parameter.
        skipped: The reasons for skipped parameters, by name.
    """

    steps: int
    layers: tuple[LayerOscillation, ...]
    skipped: Mapping[str, str]

    @property
    def oscillating(self) -> float:
        """The share of oscillating weights."""
        return self._share([layer.weights * layer.oscillating for layer in self.layers])

    @property
    def frozen(self) -> float:
        """The share of frozen weights over all parameters."""
        return self._share([layer.weights * layer.frozen for layer in self.layers])

    def _share(self, counts: Sequence[float]) -> float:
        return sum(counts) / max(self.weights, 1)

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return sum(layer.weights for layer in self.layers)

    def __str__(self) -> str:
        shares = f"{_percent(self.oscillating)} of {self.weights} weights oscillate, {_percent(self.frozen)} are frozen"
        rows = [("weight", "elements", "oscillate", "frozen"), *(layer.row() for layer in self.layers)]
        lines = [f"after {self.steps} steps: {shares}", *table(rows)]
        return "\n".join(lines + [f"{name}: skipped: {why}" for name, why in self.skipped.items()])


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
