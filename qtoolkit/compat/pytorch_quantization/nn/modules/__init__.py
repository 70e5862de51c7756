"""The modules; the package's table of aliases adds the names of pytorch-quantization's files."""

from qtoolkit.compat.pytorch_quantization.nn.modules import layers, mixins, quant_rnn, tensor_quantizer

__all__ = ["layers", "mixins", "quant_rnn", "tensor_quantizer"]
