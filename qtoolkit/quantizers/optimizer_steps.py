"""The steps of optimizers, for modules that know neither the optimizer that trains them nor the model that holds them."""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps of all optimizers of this process, from the first question on; those in compiled code do not count.

    Torch has one table of hooks for all optimizers. Nothing is there before a module that is trained asks.
    """

    def __init__(self) -> None:
        self._count, self._hears = 0, False

    def begin(self) -> None:
        """Count from now on."""
        if not self._hears:
            self._hears = True
            register_optimizer_step_post_hook(self._after_step)

    def taken(self) -> int:
        """Return how many steps were taken since the first question."""
        self.begin()
        return self._count

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not torch.compiler.is_compiling():  # compiled code would be compiled again for each count
            self._count += 1
