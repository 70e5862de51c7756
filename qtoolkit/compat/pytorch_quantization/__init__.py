"""NVIDIA's pytorch-quantization: the same names, defaults, numbers and errors over qtoolkit's ops and modules.

`import qtoolkit.compat.pytorch_quantization as pytorch_quantization` is the one line of a script that changes. For imports
of submodules (`from pytorch_quantization import nn as quant_nn`) call `install()` first, or change each. What differs is in
docs/migration.md.
"""

import sys

from qtoolkit.compat.pytorch_quantization import calib, nn, optim, quant_modules, reduction, tensor_quant
from qtoolkit.compat.pytorch_quantization.install import install
from qtoolkit.compat.pytorch_quantization.quant_modules import deactivate, enable_onnx_export, initialize

__version__ = "2.2.1"  # whose behaviour this is

utils = reduction
sys.modules[f"{__name__}.utils"] = utils

__all__ = [
    "__version__",
    "calib",
    "deactivate",
    "enable_onnx_export",
    "initialize",
    "install",
    "nn",
    "optim",
    "quant_modules",
    "tensor_quant",
    "utils",
]
