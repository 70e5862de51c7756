"""Scales and bounds that are trained by their ratio to a start."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.state import scale_dtype

if TYPE_CHECKING:
    from qtoolkit.config import QuantSpec
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


class FromStart(QuantizerKind):
    """The parameters are ratios to a start, which is a constant times the quantity that SGD trains.

    A weight behind a batch norm is quantized times the batch norm's factor f, but SGD trains the weight, and changes the
    product by f^2 times the product's gradient. So the scale gets the same share: `_rate`, the square of the constant,
    multiplies the gradient of the ratio (see `qtoolkit.ops.positive_scale`).
    """

    def tensors(self, spec: "QuantSpec", shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the start, its rate and the zero point as buffers."""
        return {**super().tensors(spec, shape), "_rate": torch.ones(shape, dtype=scale_dtype())}

    def set_grid(self, quantizer: "TensorQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the grid as the start of what is trained."""
        super().set_grid(quantizer, scale, zero_point)
        quantizer._rate.fill_(1)

    def set_rate(self, quantizer: "TensorQuantizer", trained: Tensor) -> None:
        """Store the square of the constant between the scale at the start and this one; 1 where this one is zero."""
        quantizer._rate.copy_(torch.where(trained > 0, quantizer._scale / trained, 1).square())

    def upgrade(self, state: dict[str, Any], prefix: str) -> None:
        """Add rates of 1, as they were."""
        if prefix + "_scale" in state:
            state.setdefault(prefix + "_rate", torch.ones_like(state[prefix + "_scale"]))
