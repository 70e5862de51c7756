"""pytorch_quantization.nn, by convention imported as quant_nn."""

from qtoolkit.compat.pytorch_quantization.nn import functional, modules
from qtoolkit.compat.pytorch_quantization.nn.modules.clip import Clip
from qtoolkit.compat.pytorch_quantization.nn.modules.layers import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantInstanceNorm1d,
    QuantInstanceNorm2d,
    QuantInstanceNorm3d,
    QuantLinear,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)
from qtoolkit.compat.pytorch_quantization.nn.modules.quant_rnn import QuantLSTM, QuantLSTMCell
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

AdaptiveAvgPool1d = QuantAdaptiveAvgPool1d
AdaptiveAvgPool2d = QuantAdaptiveAvgPool2d
AdaptiveAvgPool3d = QuantAdaptiveAvgPool3d
AvgPool1d = QuantAvgPool1d
AvgPool2d = QuantAvgPool2d
AvgPool3d = QuantAvgPool3d
Conv1d = QuantConv1d
Conv2d = QuantConv2d
Conv3d = QuantConv3d
ConvTranspose1d = QuantConvTranspose1d
ConvTranspose2d = QuantConvTranspose2d
ConvTranspose3d = QuantConvTranspose3d
InstanceNorm1d = QuantInstanceNorm1d
InstanceNorm2d = QuantInstanceNorm2d
InstanceNorm3d = QuantInstanceNorm3d
LSTM = QuantLSTM
LSTMCell = QuantLSTMCell
Linear = QuantLinear
MaxPool1d = QuantMaxPool1d
MaxPool2d = QuantMaxPool2d
MaxPool3d = QuantMaxPool3d

__all__ = [
    "LSTM",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Clip",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LSTMCell",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantInstanceNorm1d",
    "QuantInstanceNorm2d",
    "QuantInstanceNorm3d",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLinear",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "TensorQuantizer",
    "functional",
    "modules",
]
