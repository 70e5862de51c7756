"""Recomputation: gradient checkpointing runs a forward a second time, inside backward."""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# Private: torch has no documented way to ask. Without it, nothing counts as a recomputation.
_current_graph_task_id = getattr(torch._C, "_current_graph_task_id", None)


def is_recomputing() -> bool:
    """Return whether autograd's backward is running: a forward that runs now recomputes an earlier one."""
    if _current_graph_task_id is None or torch.compiler.is_compiling():
        return False
    return bool(_current_graph_task_id() != -1)


class _Steps:
    """How many steps the optimizers of this process have taken."""

    count = 0

    @classmethod
    def add(cls, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if not torch.compiler.is_compiling():  # compiled code would be compiled again for each count
            cls.count += 1


register_optimizer_step_post_hook(_Steps.add)


def steps_taken() -> int:
    """Return how many steps the optimizers of this process have taken; those in compiled code do not count."""
    return _Steps.count


def check_not_recomputing(name: str) -> None:
    """Raise RuntimeError if the quantizer of this name would observe a second time what it observed in the forward."""
    if is_recomputing():
        raise RuntimeError(
            f"quantizer {name!r} observes in a forward that gradient checkpointing recomputes, whose range would differ "
            f"from that of the first forward, and with it the gradients; calibrate before training and set observing=False, "
            f"as qtoolkit.freeze_ranges(model, 'activations') does, or do not checkpoint this part of the model."
        )
