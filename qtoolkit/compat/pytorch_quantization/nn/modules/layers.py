"""Layers with quantized inputs and weights, by pytorch-quantization's names, numerics and defaults."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from qtoolkit import nn as qnn
from qtoolkit.compat.pytorch_quantization.nn.modules.mixins import (
    QuantInputMixin,
    QuantMixin,
    take_quant_desc,
)
from qtoolkit.compat.pytorch_quantization.tensor_quant import (
    QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW,
)
from qtoolkit.config import QuantSpec


class _QuantLayer(QuantMixin):
    """The road from torch's arguments, with `quant_desc_input` and `quant_desc_weight`, to a layer of `qtoolkit.nn`.

    forward reads nothing but the two quantizers and what torch's layer has, as scripts make layers without `__init__`.
    """

    weight: Any
    bias: Any
    compute: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        descs = take_quant_desc(type(self), kwargs)
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descs)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Add none: they follow from descriptors."""

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float layer."""
        return ("_input_quantizer", "_weight_quantizer")

    def weight_quantizers(self) -> Mapping[str, Any]:
        """Return none: qtoolkit's own passes leave these quantizers alone."""
        return {}

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer with its quantized input and weight; further arguments as torch's layer takes them."""
        x, weight = self._input_quantizer(input), self._weight_quantizer(self.weight)
        return self.compute(x, weight, self.bias, *args, **kwargs)  # type: ignore[no-any-return]


class _QuantInputLayer(QuantInputMixin):
    """The same for a layer without a weight, on torch's own class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        desc = take_quant_desc(type(self), kwargs, input_only=True)
        super().__init__(*args, **kwargs)
        self.init_quantizer(desc)

    def forward(self, input: Tensor) -> Any:
        """Compute the layer with its quantized input."""
        return super().forward(self._input_quantizer(input))  # type: ignore[misc]  # torch's class comes next


class QuantConv1d(_QuantLayer, qnn.QuantConv1d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.Conv1d with quantized input and weight; the weight has a range for each output channel."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL


class QuantConv2d(_QuantLayer, qnn.QuantConv2d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.Conv2d with quantized input and weight; the weight has a range for each output channel."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL


class QuantConv3d(_QuantLayer, qnn.QuantConv3d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.Conv3d with quantized input and weight; the weight has a range for each output channel."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL


class QuantConvTranspose1d(_QuantLayer, qnn.QuantConvTranspose1d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.ConvTranspose1d with quantized input and weight; axis 1 has ranges, which groups share."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL


class QuantConvTranspose2d(_QuantLayer, qnn.QuantConvTranspose2d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.ConvTranspose2d with quantized input and weight; axis 1 has ranges, which groups share."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


class QuantConvTranspose3d(_QuantLayer, qnn.QuantConvTranspose3d):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.ConvTranspose3d with quantized input and weight; axis 1 has ranges, which groups share."""

    default_quant_desc_weight = QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL


class QuantLinear(_QuantLayer, qnn.QuantLinear):  # type: ignore[misc]  # quantizers by descriptors, not by specs
    """torch.nn.Linear with quantized input and weight; the weight has a range for each output feature."""

    default_quant_desc_weight = QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW


class QuantMaxPool1d(_QuantInputLayer, nn.MaxPool1d):
    """torch.nn.MaxPool1d with a quantized input."""


class QuantMaxPool2d(_QuantInputLayer, nn.MaxPool2d):
    """torch.nn.MaxPool2d with a quantized input."""


class QuantMaxPool3d(_QuantInputLayer, nn.MaxPool3d):
    """torch.nn.MaxPool3d with a quantized input."""


class QuantAvgPool1d(_QuantInputLayer, nn.AvgPool1d):
    """torch.nn.AvgPool1d with a quantized input."""


class QuantAvgPool2d(_QuantInputLayer, nn.AvgPool2d):
    """torch.nn.AvgPool2d with a quantized input."""


class QuantAvgPool3d(_QuantInputLayer, nn.AvgPool3d):
    """torch.nn.AvgPool3d with a quantized input."""


class QuantAdaptiveAvgPool1d(_QuantInputLayer, nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d with a quantized input."""


class QuantAdaptiveAvgPool2d(_QuantInputLayer, nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d with a quantized input."""


class QuantAdaptiveAvgPool3d(_QuantInputLayer, nn.AdaptiveAvgPool3d):
    """torch.nn.AdaptiveAvgPool3d with a quantized input."""


class QuantInstanceNorm1d(_QuantInputLayer, nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d with a quantized input."""


class QuantInstanceNorm2d(_QuantInputLayer, nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d with a quantized input."""


class QuantInstanceNorm3d(_QuantInputLayer, nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d with a quantized input."""
