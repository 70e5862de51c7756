"""Layers and quantizers are leaf modules for torch.fx, as the layers of torch.nn are."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import fx


def fx_leaf(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tracer of torch.fx record a call of the module, unless it traces the module itself.

    Only modules of torch.nn are leaf modules by default. What a quantizer computes depends on its range and its switches, and
    a calibrator collects values, so a graph must call the module.
    """

    @wraps(forward)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call of the module if another tracer than its own traces it; otherwise compute it."""
        for value in (*args, *kwargs.values()):
            tracer = value.tracer if isinstance(value, fx.Proxy) else None
            if isinstance(tracer, fx.Tracer) and tracer.root is not self:
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return traced
