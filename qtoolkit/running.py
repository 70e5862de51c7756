"""The present run of a forward: torch as it is called, a recomputation, a transform, a compiler or an exporter.

Call `running` where a call enters: in the forward of a prepared model, a module, an op or a hook. Functions that are
called from there take the answer as their argument `run`. Where torch calls a module in between, the module asks again.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch.autograd import forward_ad

# Private: torch has no documented ways to ask. Without them, nothing counts as transformed, or as a recomputation.
_transforms_run = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_current_graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)

# Private: torch.compiler.assume_constant_result sets this alone, in torch 2.11 to 2.14, and imports torch.compile's tracer for
# it, which takes twice as long as all of qtoolkit.
_SETS_THE_MARK = torch.__version__ < "2.15"
_MARK = "_dynamo_marked_constant"


class Run(Enum):
    """What runs a forward. Of several, the first below: a transform that recomputes counts as a transform.

    Attributes:
        compiled: Whether torch.compile or torch.export traces Python, which must not read versions of tensors, or
            remember anything.
        recorded: Whether an exporter or torch.jit records the ops, which are then the ops of the float simulation.
        exported: Whether torch.export records them, on which torch.onnx.export is built.
        for_onnx: Whether torch.onnx.export records them.
        transformed: Whether transforms of torch.func or forward-mode AD run, which store nothing.
        recomputes: Whether it runs within autograd's backward, and so recomputes an earlier forward.
        own_ops: Whether ops of qtoolkit may stand in for several of the model, and may store what a forward finds.

    Example:
        >>> running(), running().own_ops
        (<Run.EAGER: ('own_ops',)>, True)
    """

    EXPORTED_FOR_ONNX = ("compiled", "recorded", "exported", "for_onnx")
    EXPORTED = ("compiled", "recorded", "exported")
    COMPILED = ("compiled", "own_ops")
    TRACED_FOR_ONNX = ("recorded", "for_onnx")
    TRACED = ("recorded",)
    TRANSFORMED = ("transformed",)
    RECOMPUTING = ("recomputes", "own_ops")
    EAGER = ("own_ops",)

    def __init__(self, *facts: str) -> None:
        self.compiled, self.recorded, self.exported = (name in facts for name in ("compiled", "recorded", "exported"))
        self.for_onnx, self.transformed = "for_onnx" in facts, "transformed" in facts
        self.recomputes, self.own_ops = "recomputes" in facts, "own_ops" in facts


def running() -> Run:
    """Return what runs now."""
    if torch.compiler.is_compiling():
        if not torch.compiler.is_exporting():
            return Run.COMPILED
        return Run.EXPORTED_FOR_ONNX if _is_in_onnx_export() else Run.EXPORTED
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return Run.TRACED_FOR_ONNX if _is_in_onnx_export() else Run.TRACED
    # Private: forward-mode AD has no documented way to ask for its level, -1 outside of all.
    if _transforms_run() or forward_ad._current_level >= 0:
        return Run.TRANSFORMED
    return Run.EAGER if _current_graph_task_id() == -1 else Run.RECOMPUTING


def is_capturing() -> bool:
    """Return whether a CUDA graph captures what this stream computes: that runs again without Python."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def constant_result(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let torch.compile call a function while it compiles, and take what it returns for a constant."""
    if not _SETS_THE_MARK:
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return,no-untyped-call]
    setattr(function, _MARK, True)
    return function


@constant_result
def _is_in_onnx_export() -> bool:
    # torch.compile, by which torch.onnx.export records where nothing else can, takes torch's own function for False.
    return torch.onnx.is_in_onnx_export()
