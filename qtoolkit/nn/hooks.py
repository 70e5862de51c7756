"""Whether hooks watch the calls of a module: then it must be called as a module, on the values that it documents."""

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from qtoolkit.running import Run

# Private: torch has no documented way to ask. Without it, no hooks of all modules are seen.
_has_global_hooks = getattr(torch_module, "_has_any_global_hook", lambda: False)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its calls, or its call was compiled."""
    # Private: what `Module.__call__` looks at. torch has no documented way to ask.
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
    )


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a forward that was set on it."""
    return has_hooks(module) or "forward" in module.__dict__


def all_watched() -> bool:
    """Return whether hooks of all modules are registered, as `torch.nn.modules.module.register_module_forward_hook` does."""
    return bool(_has_global_hooks())


def is_ordinary(run: Run, x: object) -> bool:
    """Return whether ops may compute x by other ops than the model's own: it is a plain tensor on a CPU or CUDA device.

    They may not for a proxy or a tensor subclass, or if `Run.own_ops` is False.
    """
    return type(x) is Tensor and x.device.type in ("cpu", "cuda") and run.own_ops
