"""Convolutions."""

from typing import Any

from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.nn.weighted import QuantWeighted


class QuantConv2d(QuantWeighted, nn.Conv2d):
    """torch.nn.Conv2d with a quantized weight.

    Args:
        *args: As torch.nn.Conv2d takes them.
        weight_spec: Spec of the weight, or None; axis 0 is the output channel.
        **kwargs: As torch.nn.Conv2d takes them.

    Example:
        >>> layer = QuantConv2d(3, 8, 3, weight_spec=QuantSpec(axis=0))
        >>> layer(torch.zeros(1, 3, 5, 5)).shape
        torch.Size([1, 8, 3, 3])
    """

    FLOAT = nn.Conv2d

    def __init__(self, *args: Any, weight_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_quantizers(weight_spec, type(self).__name__)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """Convolve, in any padding mode."""
        y: Tensor = self._conv_forward(x, weight, bias)
        return y
