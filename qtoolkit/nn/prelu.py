"""A PReLU in training with its quantizer, in one op.

They are called one by one wherever that can make a difference, as `qtoolkit.nn.epilogue` does it for batch norms.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.errors import with_article
from qtoolkit.nn.epilogue import grid_now, why_quantizer_not_fused
from qtoolkit.nn.hooks import all_watched, is_ordinary, is_watched
from qtoolkit.quantizers.handed_over import hand_over
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def why_prelu_not_fused(activation: nn.Module, quantizer: nn.Module) -> str | None:
    """Return why an op does not compute an activation with its quantizer in training mode, of the modules as they are now."""
    if type(activation) is not nn.PReLU:
        return f"{with_article(type(activation))} is no nn.PReLU"
    if is_watched(activation):
        return "it has hooks"
    why = why_quantizer_not_fused(quantizer)
    if why is None and isinstance(quantizer, TensorQuantizer):
        zero_point = quantizer.kind.grid(quantizer)[1]
        why = "its quantizer trains a zero point" if zero_point is not None and zero_point.requires_grad else None
    return why


def prelu(x: Any, activation: Any, quantizer: Any) -> Tensor:
    """Call an nn.PReLU and its quantizer, by one op where it trains."""
    not_fused = all_watched() or not activation.training or why_prelu_not_fused(activation, quantizer) is not None
    if not_fused or not is_ordinary(x) or not _fits(activation.weight, x):
        return quantizer(activation(x))  # type: ignore[no-any-return]
    grid = grid_now(quantizer, x)
    y = ops.prelu_fake_quant(x, activation.weight, **grid)
    if quantizer.capability.codes and y.requires_grad:
        hand_over(y, None, grid["scale"], grid["zero_point"], quantizer)
    return y


def _fits(weight: Tensor, x: Tensor) -> bool:
    """Return whether the op gives a result of torch's dtype; PReLU itself has the errors for what the op does not take."""
    device = x.device.type
    if weight.numel() != 1 and (x.dim() < 2 or x.size(1) != weight.numel()):
        return False
    if torch.is_autocast_enabled(device):
        return x.dtype == torch.get_autocast_dtype(device)
    return x.dtype == weight.dtype and weight.device == x.device
