"""Modules that were put around a layer after it was quantized: adapters, and wrappers that only call it."""

from torch import nn

from qtoolkit.errors import warn, with_article
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.wrapped import unwrapped


def warn_of_adapter(name: str, module: nn.Module, bn_name: str, bn: nn.Module) -> None:
    """Warn if a module that is called in a layer's place, before the layer's batch norm, may change the layer's output."""
    layers = (part for part in module.modules() if isinstance(part, QuantWeighted) and part.batch_norm is bn)
    layer, last = next(layers, None), unwrapped(module)
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if layer is None or layer is last:
        return
    warn(
        f"the layer {name!r} is called by {with_article(type(module))} now, and the batch norm {bn_name!r} after it is still "
        f"folded into the layer in eval mode and by qtoolkit.convert: what the {type(module).__name__} adds to the layer's "
        f"output is not normalized there, though it is in training. Put it around both of them, or change the float model and "
        f"quantize it again.",
    )
