"""NVIDIA's pytorch-quantization API (the same names, defaults, numerics and errors) on top of qtoolkit's ops and modules.

Change one line of your script: `import qtoolkit.compat.pytorch_quantization as pytorch_quantization`. For imports of submodules
(`from pytorch_quantization import nn as quant_nn`) call `install()` first. docs/migration.md lists the differences.
"""

import sys

from qtoolkit.compat.installing import install_as
from qtoolkit.compat.pytorch_quantization import calib, cuda_ext, nn, optim, quant_modules, reduction, tensor_quant
from qtoolkit.compat.pytorch_quantization.nn import functional
from qtoolkit.compat.pytorch_quantization.nn.modules import layers, mixins
from qtoolkit.compat.pytorch_quantization.quant_modules import deactivate, enable_onnx_export, initialize

__version__ = "2.2.1"  # the release whose behaviour this is

utils = reduction
_ALIASES = {  # pytorch-quantization's file -> the module that has its names
    "calib.max": calib.calibrator,
    "nn.modules._utils": mixins,
    "nn.modules.clip": functional,
    "nn.modules.quant_conv": layers,
    "nn.modules.quant_instancenorm": layers,
    "nn.modules.quant_linear": layers,
    "nn.modules.quant_pooling": layers,
    "optim.helper": optim,
    "utils": reduction,
    "utils.quant_logging": reduction,
}

for _path, _module in _ALIASES.items():
    _parent, _, _attribute = f"{__name__}.{_path}".rpartition(".")
    setattr(sys.modules[_parent], _attribute, _module)
    sys.modules[f"{__name__}.{_path}"] = _module
sys.modules[f"{__name__}.utils.reduce_amax"] = reduction  # the attribute `utils.reduce_amax` is the function


def install() -> None:
    """Make `import pytorch_quantization`, and imports of its submodules, return this package.

    A second call has no effect.

    Raises:
        RuntimeError: NVIDIA's package is already imported.

    Example:
        >>> install()
        >>> from pytorch_quantization import nn as quant_nn
        >>> quant_nn.QuantConv2d.__module__
        'qtoolkit.compat.pytorch_quantization.nn.modules.layers'
    """
    install_as(__name__, "pytorch_quantization")


__all__ = [
    "__version__", "calib", "cuda_ext", "deactivate", "enable_onnx_export", "initialize", "install", "nn", "optim",
    "quant_modules", "tensor_quant", "utils",
]  # fmt: skip
