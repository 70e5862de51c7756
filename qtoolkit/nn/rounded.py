"""Which layers differ from the float model's: methods of qtoolkit.tuning have rounded weights or corrected biases."""

from collections.abc import Mapping

import torch
from torch import nn

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.spec_ops import per_element
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

ON_GRID = 0.05  # of a step: a weight of a coarse dtype may be as far from its grid


def is_rounded(layer: nn.Module) -> bool:
    """Return whether a layer's weight was rounded to its grid, and is not there by itself, as a constant kernel is.

    Raises RuntimeError: the quantizer of the weight has no range yet.

    Example:
        >>> layer = qt.nn.QuantLinear(4, 2, weight_spec=qt.QuantSpec(bits=4, axis=0))
        >>> is_rounded(layer)
        False
    """
    if not isinstance(layer, QuantWeighted):
        return False
    quantizer = layer.weight_quantizer
    if not isinstance(quantizer, TensorQuantizer) or quantizer.following or not quantizer.capability.plain:
        return False
    with torch.no_grad():
        weight = layer.effective_weight().detach().to(quantizer.scale.dtype)
        distance = (quantizer.quantize(weight) - weight).abs()
        # A batch norm's factor was taken off the weight and put on again.
        rounding = 4 * torch.finfo(layer.weight.dtype).eps * weight.abs()
        step = per_element(quantizer.scale, weight, quantizer.spec, quantizer.group)
        return bool((distance <= torch.minimum(rounding, ON_GRID * step)).all() and weight.any())


def rounded_in(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names, in quotes, of the layers whose weights were rounded to their grids."""
    return [repr(name) for name, layer in layers.items() if is_rounded(layer)]


def corrected_in(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names, in quotes, of the layers whose biases `qtoolkit.tuning.bias_correction` has changed."""
    return [
        repr(name) for name, layer in layers.items() if isinstance(layer, QuantWeighted) and layer.bias_is_corrected
    ]
