"""Checks of what a graph would lose without an error: hooks of modules, and buffers that a forward assigns."""

from torch import fx, nn


def check_hooks(module: nn.Module) -> None:
    """Raise RuntimeError for a module with forward hooks: they would run once, on proxies, and then be lost."""
    if any(module.__dict__.get(name) for name in ("_forward_hooks", "_forward_pre_hooks")):
        raise RuntimeError(
            "this module has forward hooks, which a graph does not record; remove them first, "
            "those of torch.nn.utils.prune by prune.remove."
        )


def check_assigned(model: nn.Module) -> None:
    """Raise RuntimeError if a forward has assigned a traced value to a buffer."""
    for name, module in model.named_modules():
        for buffer, value in module._buffers.items():
            if isinstance(value, fx.Proxy):
                raise RuntimeError(
                    f"the forward assigns to buffer {buffer!r} of {name or 'the model'!r}, which a graph does not record; "
                    f"write into the buffer with copy_ or add_."
                )
