"""The clock of training steps: one for the process, which each step of an optimizer advances.

Values that hold for a step of the training, such as the scale of a range that follows the data, or the variance with
which a weight is quantized, change at the first forward after the clock has moved. A module keeps in a tensor what the
clock showed when it took the present value, and compares by tensor arithmetic: nothing waits for the device, and
compiled forwards and CUDA graphs do the same.

The step of any optimizer advances it, so that the step of another model's optimizer ends a step too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from qtoolkit.running import is_capturing, running

NEVER = -1
"""The time that a module has before its first step."""


class StepClock:
    """The number of steps that optimizers have taken, in an int64 tensor for each device that asks.

    Torch has one table of hooks for all optimizers, to which `begin` adds one.

    Example:
        >>> from qtoolkit.quantizers.step_clock import CLOCK
        >>> CLOCK.begin()
        >>> clock, weight = CLOCK.on(torch.device("cpu")), torch.nn.Parameter(torch.ones(2))
        >>> before = clock.clone()
        >>> torch.optim.SGD([weight], 0.1).step()
        >>> clock - before
        tensor(1)
    """

    def __init__(self) -> None:
        self._clocks: dict[torch.device, Tensor] = {}
        self._begun = False

    def begin(self, device: torch.device | None = None) -> None:
        """Count from now on, on a device. Modules call it when they are made, copied or moved, as no compiler traces it."""
        if device is not None and device.type != "meta":
            self.on(device)
        if not self._begun:
            self._begun = True
            register_optimizer_step_post_hook(self._advance)

    def on(self, device: torch.device) -> Tensor:
        """Return the clock's value on a device.

        Raises:
            RuntimeError: A CUDA graph is being captured, and no forward in training has run on the device before.
        """
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._new(device)
            if type(clock) is Tensor:  # not the FakeTensor of an export
                self._clocks[device] = clock
        return clock

    def _new(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            clock = torch.ones((), dtype=torch.int64, device=device)
        if clock.is_cuda and not running().compiled and is_capturing():
            raise RuntimeError(
                "a CUDA graph is captured before the model has run on the device in training mode; run some steps on a side "
                "stream first, as torch.cuda.graph asks."
            )
        return clock

    def _advance(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for clock in self._clocks.values():
            clock.add_(1)


CLOCK = StepClock()
"""The clock of this process."""
