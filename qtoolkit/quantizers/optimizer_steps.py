"""The steps of optimizers, for modules that know neither the optimizer that trains them nor the model that holds them."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def trained_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class OptimizerSteps:
    """Counts the steps of each optimizer of this process, from the first question on; those in compiled code do not count.

    Torch has one table of hooks for all optimizers. Nothing is there before a module that is trained asks.
    """

    def __init__(self) -> None:
        self._hears, self._count = False, 0
        self._counts: WeakKeyDictionary[Optimizer, tuple[set[int], int]] = WeakKeyDictionary()

    def begin(self) -> None:
        """Count from now on."""
        if not self._hears:
            self._hears = True
            register_optimizer_step_post_hook(self._after_step)

    def taken(self, parameters: Iterable[Tensor]) -> tuple[bool, int]:
        """Return how many steps the optimizers of these parameters have taken, so that those of other models do not count.

        Returns:
            Whether an optimizer that has taken a step trains one of them, and its steps; if none does, those of all optimizers:
            parameters that are not trained, and those before the first step of their optimizer, go by every step.
        """
        self.begin()
        own = set(map(id, parameters))
        counts = [count for trained, count in self._counts.values() if not own.isdisjoint(trained)]
        return bool(counts), sum(counts) if counts else self._count

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not torch.compiler.is_compiling():  # compiled code would be compiled again for each count
            self._count += 1
            _, count = self._counts.get(optimizer, (set(), 0))
            self._counts[optimizer] = trained_by(optimizer), count + 1
