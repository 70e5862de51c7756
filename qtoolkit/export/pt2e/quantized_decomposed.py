"""torch's ops of the PT2E form, namespace `quantized_decomposed`: the only file that names the module which defines them.

The module is private in torch, and its ops are what the delegates of ExecuTorch and torchao's PT2E flow match.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

MODULE = "torch.ao.quantization.fx._decomposed"
NAMES = ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel")


def decomposed_ops() -> Any:
    """Return the ops by their names.

    Raises:
        RuntimeError: This torch does not have them.
    """
    try:
        import_module(MODULE)  # registers the ops
        found = {name: getattr(torch.ops.quantized_decomposed, name).default for name in NAMES}
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"export_program: torch {torch.__version__} does not have the ops of quantized_decomposed ({error}); import the "
            f"package that defines them (torchao), or take torch 2.11 to 2.14."
        ) from error
    return SimpleNamespace(**found)
