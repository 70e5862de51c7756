"""pytorch_quantization.nn.functional: a clamp with gradients for its bounds, and the module `Clip`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from qtoolkit.compat.pytorch_quantization.tensor_quant import function_class


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, low), high)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, low, high = ctx.saved_tensors
        _, wants_low, wants_high = ctx.needs_input_grad
        for name, bound, wanted in (("clip_value_min", low, wants_low), ("clip_value_max", high, wants_high)):
            if wanted and bound.numel() != 1:
                raise ValueError(
                    f"clip: Learnable min/max can only be scalar; {name} requires grad, got the shape {list(bound.shape)}."
                )
        grad_low = (grad * (x <= low)).sum().reshape(low.shape).to(low.dtype) if wants_low else None
        grad_high = (grad * (x >= high)).sum().reshape(high.shape).to(high.dtype) if wants_high else None
        return grad * ((x > low) & (x < high)), grad_low, grad_high


def clip(inputs: Tensor, clip_value_min: Tensor | float, clip_value_max: Tensor | float) -> Tensor:
    """Clamp to bounds, numbers or tensors that broadcast to the input, which may require gradients.

    The gradient passes to the input strictly between the bounds. Each bound gets the sum of the gradients at or beyond it.
    Raises ValueError in backward: a bound of several elements requires a gradient.

    Example:
        >>> high = torch.tensor(2.0, requires_grad=True)
        >>> clip(torch.tensor([1.0, 3.0, 4.0]), 0.0, high).sum().backward()
        >>> high.grad
        tensor(2.)
    """
    bounds = [
        torch.as_tensor(bound, device=inputs.device).to(inputs.dtype) for bound in (clip_value_min, clip_value_max)
    ]
    return _Clip.apply(inputs, *bounds)  # type: ignore[no-any-return]  # a Tensor


ClipFunction = function_class("ClipFunction", clip)


class Clip(nn.Module):
    """Clamp to [clip_value_min, clip_value_max], as `clip` does.

    `learn_min` and `learn_max` make a bound a Parameter; it must then be a number, or an array of one. Raises ValueError: a
    bound to be trained is a tensor, or has several elements.

    Example:
        >>> Clip(-1.0, 2.0, learn_max=True)(torch.tensor([-3.0, 1.0, 3.0])).tolist()
        [-1.0, 1.0, 2.0]
    """

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self,
        clip_value_min: Tensor | float,
        clip_value_max: Tensor | float,
        learn_min: bool = False,
        learn_max: bool = False,
    ) -> None:
        super().__init__()
        self._add_bound("clip_value_min", clip_value_min, learn_min)
        self._add_bound("clip_value_max", clip_value_max, learn_max)

    def _add_bound(self, name: str, value: Tensor | float, learn: bool) -> None:
        bound = torch.as_tensor(value, dtype=torch.float32).detach().clone()
        if not learn:
            self.register_buffer(name, bound)
        elif bound.numel() == 1 and not isinstance(value, Tensor):
            self.register_parameter(name, nn.Parameter(bound))
        else:
            got = "a tensor, which would not be trained; pass float(bound)" if bound.numel() == 1 else list(bound.shape)
            raise ValueError(f"Clip: {name} must be scalar to be trained, got {got}.")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the clamped input."""
        return clip(inputs, self.clip_value_min, self.clip_value_max)
