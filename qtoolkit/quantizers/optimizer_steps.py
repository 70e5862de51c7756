"""The steps of optimizers, for modules that know neither the optimizer that trains them nor the model that holds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def trained_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@dataclass
class Steps:
    """The steps that an optimizer has taken."""

    trained: set[int]  # the ids of the parameters that it trains
    count: int = 0  # their number


class OptimizerSteps:
    """Counts the steps of each optimizer of this process, from the first question on; those in compiled code do not count.

    Torch has one table of hooks for all optimizers. Nothing is there before a module that is trained asks.
    `looks` changes when an optimizer takes its first step, or trains other parameters than before.
    """

    def __init__(self) -> None:
        self._hears, self._count, self.looks = False, 0, 0
        self._steps: WeakKeyDictionary[Optimizer, Steps] = WeakKeyDictionary()

    def begin(self) -> None:
        """Count from now on."""
        if not self._hears:
            self._hears = True
            register_optimizer_step_post_hook(self._after_step)

    def of(self, parameters: Iterable[Tensor]) -> list[Steps]:
        """Return the steps of the optimizers that train one of these parameters; as long as `looks` stays, these are all."""
        self.begin()
        own = set(map(id, parameters))
        return [steps for steps in self._steps.values() if not own.isdisjoint(steps.trained)]

    def taken(self, steps: Sequence[Steps]) -> tuple[bool, int]:
        """Return whether an optimizer that has taken a step trains the parameters of `steps` (see `of`), and its steps.

        If none does, those of all optimizers: parameters that are not trained, and those before the first step of their
        optimizer, go by every step.
        """
        return bool(steps), sum([each.count for each in steps]) if steps else self._count

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if torch.compiler.is_compiling():  # compiled code would be compiled again for each count
            return
        self._count += 1
        trained, steps = trained_by(optimizer), self._steps.get(optimizer)
        if steps is None or steps.trained != trained:
            self.looks += 1
            steps = self._steps[optimizer] = Steps(trained, 0 if steps is None else steps.count)
        steps.count += 1
