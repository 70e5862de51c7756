"""install: the import names of pytorch-quantization itself."""

import sys

_NAME, _OURS = "pytorch_quantization", "qtoolkit.compat.pytorch_quantization"


def install() -> None:
    """Let `import pytorch_quantization`, and any of its submodules, give this package; called again, it does nothing.

    Raises:
        RuntimeError: NVIDIA's package is imported already.

    Example:
        >>> install()
        >>> from pytorch_quantization import nn as quant_nn
        >>> quant_nn.QuantConv2d.__module__
        'qtoolkit.compat.pytorch_quantization.nn.modules.layers'
    """
    ours = {name: module for name, module in sys.modules.items() if name == _OURS or name.startswith(f"{_OURS}.")}
    there = sys.modules.get(_NAME)
    if there is not None and there is not ours[_OURS]:
        raise RuntimeError(
            f"install: {_NAME} is imported already, from {getattr(there, '__file__', None)}; call install() before its import."
        )
    sys.modules.update({_NAME + name.removeprefix(_OURS): module for name, module in ours.items()})
