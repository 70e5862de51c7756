"""Clip: a clamp whose bounds may be trained."""

import torch
from torch import Tensor, nn

from qtoolkit.compat.pytorch_quantization.nn import functional


class Clip(nn.Module):
    """Clamp to [clip_value_min, clip_value_max].

    Args:
        clip_value_min: Lower bound: a number, or a tensor that broadcasts to the input.
        clip_value_max: Upper bound, likewise.
        learn_min: Make the lower bound a Parameter; it must be a number.
        learn_max: Make the upper bound a Parameter; it must be a number.

    Raises:
        ValueError: A bound to be trained has several elements.

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
        self._put("clip_value_min", clip_value_min, learn_min)
        self._put("clip_value_max", clip_value_max, learn_max)

    def _put(self, name: str, value: Tensor | float, learn: bool) -> None:
        bound = torch.as_tensor(value, dtype=torch.float32).detach().clone()
        if not learn:
            self.register_buffer(name, bound)
        elif bound.numel() == 1:
            self.register_parameter(name, nn.Parameter(bound))
        else:
            raise ValueError(f"Clip: {name} can be trained as one number only, got shape {list(bound.shape)}.")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the clamped input."""
        return functional.clip(inputs, self.clip_value_min, self.clip_value_max)
