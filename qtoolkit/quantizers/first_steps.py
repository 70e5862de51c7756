"""Warnings about ranges that go wrong in the first steps of a training, by name.

A watcher looks at the quantizers that were calibrated lately, after each step of an optimizer. It warns, and changes no number.
Only the few steps in `LOOKED_AT` and `GROWTH_AT` wait for the device.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from qtoolkit.errors import warn
from qtoolkit.processes import own_part
from qtoolkit.quantizers.spec_ops import per_element
from qtoolkit.running import is_capturing, running

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

FOLLOWED_STEPS = 200  # after a wrong start, 0.9^200 of it is left
MOMENTUM = 0.1  # the weight of each forward's range
LOOKED_AT = (2, 10, 100, 250)  # the steps whose forwards say how much is clipped
LAST_STEP = max(LOOKED_AT)
GROWTH_AT = (1, 2, 5, 10, 20, 50, 100)  # the steps after which learned scales are compared with their start
FAR = 8.0  # times its start, or this part of it
MUCH_CLIPPED = 0.05  # the best range of eight levels for a normal distribution clips 3 %
RANGES = (
    "Calibrate again on data as in training (qtoolkit.calibrate), with the model in training mode, and take a signed "
    "spec for values of both signs"
)


@dataclass(slots=True)
class Watched:
    """The facts of a watcher about a quantizer."""

    steps: int = 0  # that optimizers have taken since the calibration
    clip_check_due: bool = False  # whether the next forward in training looks at its input
    clipped: Tensor | None = None  # what it has seen (see `look`)


def much_clipped(quantizer: "TensorQuantizer", share: float | None) -> bool:
    """Return whether a share of clipped values is too much: a percentile may ask for it, and few bits need it."""
    asked = quantizer.spec.bits <= 2 or quantizer.spec.observer_args.get("method") == "percentile"
    return (share or 0) > MUCH_CLIPPED and not asked


def look(quantizer: "TensorQuantizer", x: Tensor) -> Tensor:
    """Return the share of x beyond the grid by more than half a step, and whether x is rounded to zeros alone."""
    x, spec, group = x.detach(), quantizer.spec, quantizer.group
    values = (*quantizer.kind.input_ends(quantizer), quantizer.scale / 2)
    low, high, half = (per_element(value, x, spec, group) for value in values)
    clipped = ((x < low - half) | (x > high + half)).float().mean()
    vanished = (x.abs() < half).all() & (x != 0).any()
    return torch.stack((clipped, vanished.float()))


def warn_of_growth(quantizers: Sequence["TensorQuantizer"]) -> None:
    """Warn once of each learned scale that has left [1/8, 8] times its start. Waits for the device."""
    grown = [(quantizer, quantizer.kind.growth(quantizer)) for quantizer in quantizers if not quantizer.warned]
    own = [(quantizer, own_part(growth).flatten()) for quantizer, growth in grown if growth is not None]
    known = [(quantizer, growth) for quantizer, growth in own if growth.numel()]
    farthest = (growth[growth.log2().abs().argmax()].reshape(1) for _, growth in known)
    for (quantizer, _), (times,) in zip(known, _values(farthest), strict=True):
        if math.isnan(times):
            _warn(
                quantizer, "has a learned scale that is NaN", "qtoolkit.stop_on_nonfinite finds where the first one is"
            )
        elif not 1 / FAR <= times <= FAR:
            found = f"has a learned scale that is {times:.3g} times its start"
            _warn(quantizer, found, "Train the scales at a lower rate (scale_lr of qtoolkit.parameter_groups)")


def _values(of: Iterable[Tensor]) -> list[list[float]]:
    """Return the values of small tensors of one size, by one copy from each device."""
    tensors = [tensor.double() for tensor in of]
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack(tensors).tolist() if tensors else []


def _warn(quantizer: "TensorQuantizer", found: str, remedy: str) -> None:
    if not quantizer.warned:
        quantizer.warned = True
        warn(f"quantizer {quantizer.name!r} {found}. {remedy}; see docs/training.md.")


class Watcher:
    """Looks at quantizers in the first steps after their calibration. The steps of all optimizers count."""

    def __init__(self) -> None:
        self.quantizers: WeakSet[TensorQuantizer] = WeakSet()
        self._hooked = False

    def watch(self, quantizer: "TensorQuantizer") -> None:
        """Look at a quantizer from now on."""
        self.quantizers.add(quantizer)
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Compiled code would be compiled again for each count; a CUDA graph cannot wait for what it computes.
        if not self.quantizers or running().compiled or is_capturing():
            return
        # A conversion in place gives a quantizer another class, and the end of its first steps takes the entry away.
        pairs = [(quantizer, getattr(quantizer, "watched", None)) for quantizer in tuple(self.quantizers)]
        for quantizer, entry in pairs:
            if entry is None:
                self.quantizers.discard(quantizer)
        stepped = {quantizer: entry for quantizer, entry in pairs if entry is not None and _is_trained(quantizer)}
        with torch.no_grad():
            self._say_what_is_wrong(stepped)
            for quantizer in stepped:
                quantizer.end_step()

    def _say_what_is_wrong(self, watched: dict["TensorQuantizer", Watched]) -> None:
        looked = [(quantizer, entry) for quantizer, entry in watched.items() if entry.clipped is not None]
        shares = _values(entry.clipped for _, entry in looked if entry.clipped is not None)
        for (quantizer, entry), (clipped, vanished) in zip(looked, shares, strict=True):
            if quantizer.follows_data:  # a range that follows may lag behind, as with a branch that begins with zeros
                continue
            if vanished:
                _warn(quantizer, f"rounds its whole input to zero after {entry.steps + 1} steps of training", RANGES)
            elif much_clipped(quantizer, clipped):
                _warn(quantizer, f"clips {clipped:.1%} of its input after {entry.steps + 1} steps of training", RANGES)
        warn_of_growth([quantizer for quantizer, entry in watched.items() if entry.steps + 1 in GROWTH_AT])


def _is_trained(quantizer: "TensorQuantizer") -> bool:
    """Return whether learned scales have gradients: after their training begins, and not in a copy of an averaged model."""
    own = [*quantizer.parameters()]
    return not own or any(parameter.grad is not None for parameter in own)


def after(watched: Watched, of_input: bool) -> Watched:
    """Return the facts about a quantizer after one more step.

    A new object where the next forward looks at its input, and after it: an op that computes the quantizer too notices.
    """
    steps = watched.steps + 1
    waits = watched.clip_check_due and watched.clipped is None  # for a forward, while another optimizer steps
    due = waits or (of_input and steps + 1 in LOOKED_AT)
    if due != watched.clip_check_due or watched.clipped is not None:
        return Watched(steps, due)
    watched.steps = steps
    return watched


WATCHER = Watcher()
"""The watcher of this process."""
