"""The modules, under the names of pytorch-quantization's files too."""

import sys

from qtoolkit.compat.pytorch_quantization.nn.modules import (
    clip,
    layers,
    mixins,
    quant_rnn,
    tensor_quantizer,
)

_utils = mixins
quant_conv = quant_linear = quant_pooling = quant_instancenorm = layers

for _name in ("_utils", "quant_conv", "quant_linear", "quant_pooling", "quant_instancenorm"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]

__all__ = [
    "clip",
    "quant_conv",
    "quant_instancenorm",
    "quant_linear",
    "quant_pooling",
    "quant_rnn",
    "tensor_quantizer",
]
