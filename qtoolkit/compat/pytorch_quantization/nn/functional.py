"""pytorch_quantization.nn.functional: a clamp with gradients for its bounds."""

from typing import Any

import torch
from torch import Tensor


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, low), high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, low, high = ctx.saved_tensors
        _, wants_low, wants_high = ctx.needs_input_grad
        grad_low = (grad * (x <= low)).sum().reshape(low.shape).to(low.dtype) if wants_low else None
        grad_high = (grad * (x >= high)).sum().reshape(high.shape).to(high.dtype) if wants_high else None
        return grad * ((x > low) & (x < high)), grad_low, grad_high


def clip(inputs: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float) -> Tensor:
    """Clamp to bounds that may have gradients.

    The gradient of the input is that of the result strictly between the bounds and 0 elsewhere; a bound has the sum of
    those at or beyond it.

    Args:
        inputs: Any tensor.
        clip_value_min: Lower bound, a number or a tensor that broadcasts to the input.
        clip_value_max: Upper bound, likewise.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        ValueError: A bound of several elements requires a gradient.

    Example:
        >>> high = torch.tensor(2.0, requires_grad=True)
        >>> clip(torch.tensor([1.0, 3.0, 4.0]), 0.0, high).sum().backward()
        >>> high.grad
        tensor(2.)
    """
    bounds = []
    for name, value in (("clip_value_min", clip_value_min), ("clip_value_max", clip_value_max)):
        bound = torch.as_tensor(value, device=inputs.device)
        if bound.requires_grad and bound.numel() != 1:
            raise ValueError(f"clip: {name} can be learned as one number only, got the shape {list(bound.shape)}.")
        bounds.append(bound.to(inputs.dtype))
    return _Clip.apply(inputs, *bounds)  # type: ignore[no-any-return]  # a Tensor
