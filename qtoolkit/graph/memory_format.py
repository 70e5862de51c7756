"""The memory format in which a prepared model computes in training: channels_last where its layers compute on codes.

torch's int8 convolutions take and return channels_last. So do the convolutions of backward, which are faster in it: without
conversions at each layer, the model converts its inputs, and its outputs back.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.graph.block_calls import map_leaves
from qtoolkit.nn import QuantConv2d, on_codes

VIEWS = ("view", "view_as", "as_strided")  # methods that fail where a tensor has other strides than the model expects


def in_channels_last(gm: fx.GraphModule, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that computes what another one does, in channels_last in training where that is faster.

    Args:
        gm: The model.
        forward: The function of its code.
    """
    names = [name for name, module in gm.named_modules() if isinstance(module, QuantConv2d)]
    if not names or not _takes_any_strides(gm):
        return forward

    @functools.wraps(forward)
    def converted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trains = self.training and torch.is_grad_enabled() and any(map(_is_in_rows, (*args, *kwargs.values())))
        if not trains or not any(_computes_on_codes(self, name) for name in names):
            return forward(self, *args, **kwargs)
        args, kwargs = map_leaves((args, kwargs), _to_channels_last)
        return map_leaves(forward(self, *args, **kwargs), _to_rows)

    return converted


def _computes_on_codes(model: nn.Module, name: str) -> bool:
    layer = model.get_submodule(name)
    if not isinstance(layer, QuantConv2d) or on_codes.why_not_on_codes(layer) is not None:
        return False
    return all(quantizer is not None and quantizer.quantizing for quantizer in (layer.source, layer.weight_quantizer))


def _takes_any_strides(gm: fx.GraphModule) -> bool:
    """Return whether the model computes the same for any strides: it has no views, nor code that was not traced."""
    plan = vars(gm).get("plan")
    if plan is None or plan.tracing.leaf_modules or plan.tracing.skip:
        return False
    return not any(node.op == "call_method" and node.target in VIEWS for node in gm.graph.nodes)


def _is_in_rows(x: Any) -> bool:
    """Return whether a value is a float32 image on the CPU with its channels outermost."""
    return isinstance(x, Tensor) and x.dim() == 4 and x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()


def _to_channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) if _is_in_rows(x) else x


def _to_rows(y: Any) -> Any:
    return y.contiguous() if isinstance(y, Tensor) and y.dim() == 4 else y
