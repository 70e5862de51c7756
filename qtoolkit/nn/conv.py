"""Convolutions."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

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
        if self.padding_mode == "zeros":
            return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        x = F.pad(x, self.edges(), mode=self.padding_mode)
        return F.conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)

    def edges(self) -> list[int]:
        """Return the padding of each edge, as torch.nn.functional.pad takes them: from the last dimension back."""
        totals = [2 * int(p) for p in self.padding] if isinstance(self.padding, tuple) else [0, 0]
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)]
