"""Forwards in which no range may change: recomputations of gradient checkpointing, and the transforms of torch.func."""

import torch

from qtoolkit.ops.recording import is_transformed

# Private: torch has no documented way to ask. Without it, nothing counts as a recomputation.
_current_graph_task_id = getattr(torch._C, "_current_graph_task_id", None)


def is_recomputing() -> bool:
    """Return whether autograd's backward is running: a forward that runs now recomputes an earlier one."""
    if _current_graph_task_id is None or torch.compiler.is_compiling():
        return False
    return bool(_current_graph_task_id() != -1)


def check_not_recomputing(name: str) -> None:
    """Raise RuntimeError if the quantizer of this name would observe a second time what it observed in the forward."""
    if is_recomputing():
        raise RuntimeError(
            f"quantizer {name!r} observes in a forward that gradient checkpointing recomputes, so that its range, and the "
            f"gradients, would differ from those of the first forward. Calibrate before training and set observing=False, "
            f"as qtoolkit.freeze_ranges(model, 'activations') does, or do not checkpoint this part of the model."
        )


def check_not_transformed(name: str) -> None:
    """Raise NotImplementedError if the range of the quantizer of this name would change under a transform."""
    if is_transformed():
        raise NotImplementedError(
            f"quantizer {name!r} changes its range in this forward, which the transforms of torch.func (vmap, grad) and "
            f"forward-mode AD do not support; call model.eval() or qtoolkit.freeze_ranges(model) before. For gradients, use "
            f"torch.autograd.grad or backward, with torch.func.functional_call to pass parameters in."
        )
