"""Linear layers."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.config import QuantSpec
from qtoolkit.nn.weighted import QuantWeighted


class QuantLinear(QuantWeighted, nn.Linear):
    """torch.nn.Linear with a quantized weight.

    Args:
        *args: As torch.nn.Linear takes them.
        weight_spec: Spec of the weight, or None; axis 0 is the output feature.
        **kwargs: As torch.nn.Linear takes them.

    Example:
        >>> QuantLinear(4, 2, weight_spec=QuantSpec(axis=0))(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    FLOAT = nn.Linear

    def __init__(self, *args: Any, weight_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_quantizers(weight_spec, type(self).__name__)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """Multiply by the weight and add the bias."""
        return F.linear(x, weight, bias)
