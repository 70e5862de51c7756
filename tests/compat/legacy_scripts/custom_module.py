"""A module of one's own with one quantizer for its three inputs, as the documentation has it."""

import sys

import torch

from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor


class QuantMultiAdd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._input_quantizer = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=8, calib_method="histogram"))

    def forward(self, x, y, z):
        return self._input_quantizer(x) + self._input_quantizer(y) + self._input_quantizer(z)


def main(folder):
    torch.manual_seed(0)
    add = QuantMultiAdd()
    x, y, z = torch.randn(64, 10), 3 * torch.randn(64, 10), torch.randn(64, 10).abs()
    dynamic = add(x, y, z)

    quantizer = add._input_quantizer
    quantizer.disable_quant()
    quantizer.enable_calib()
    add(x, y, z)
    quantizer.load_calib_amax("percentile", percentile=99.0)
    quantizer.disable_calib()
    quantizer.enable_quant()
    torch.save({"x": (x, y, z), "dynamic": dynamic, "amax": quantizer.amax, "y": add(x, y, z)}, f"{folder}/add.pth")


if __name__ == "__main__":
    main(sys.argv[1])
