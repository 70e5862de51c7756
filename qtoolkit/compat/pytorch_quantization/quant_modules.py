"""pytorch_quantization.quant_modules: names of torch.nn that stand for quantized layers while it is active.

For new work take `qtoolkit.quant_modules`, which converts models that exist and leaves torch.nn's names as they are.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from qtoolkit.errors import unknown


class QuantEntry(NamedTuple):
    """A class that is replaced: the module (or namespace) that names it, its name, and what stands for it."""

    orig_mod: Any
    mod_name: str
    replace_mod: type[torch.nn.Module]


_DEFAULT_QUANT_MAP = [
    QuantEntry(torch.nn, "Conv1d", quant_nn.QuantConv1d),
    QuantEntry(torch.nn, "Conv2d", quant_nn.QuantConv2d),
    QuantEntry(torch.nn, "Conv3d", quant_nn.QuantConv3d),
    QuantEntry(torch.nn, "ConvTranspose1d", quant_nn.QuantConvTranspose1d),
    QuantEntry(torch.nn, "ConvTranspose2d", quant_nn.QuantConvTranspose2d),
    QuantEntry(torch.nn, "ConvTranspose3d", quant_nn.QuantConvTranspose3d),
    QuantEntry(torch.nn, "Linear", quant_nn.QuantLinear),
    QuantEntry(torch.nn, "LSTM", quant_nn.QuantLSTM),
    QuantEntry(torch.nn, "LSTMCell", quant_nn.QuantLSTMCell),
    QuantEntry(torch.nn, "AvgPool1d", quant_nn.QuantAvgPool1d),
    QuantEntry(torch.nn, "AvgPool2d", quant_nn.QuantAvgPool2d),
    QuantEntry(torch.nn, "AvgPool3d", quant_nn.QuantAvgPool3d),
    QuantEntry(torch.nn, "AdaptiveAvgPool1d", quant_nn.QuantAdaptiveAvgPool1d),
    QuantEntry(torch.nn, "AdaptiveAvgPool2d", quant_nn.QuantAdaptiveAvgPool2d),
    QuantEntry(torch.nn, "AdaptiveAvgPool3d", quant_nn.QuantAdaptiveAvgPool3d),
]


class QuantModuleReplacementHelper:
    """What is replaced, and the classes that were there before."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], QuantEntry] = {}
        self.originals: dict[tuple[int, str], QuantEntry] = {}

    def prepare_state(
        self,
        float_module_list: Sequence[str] | None = None,
        custom_map: Sequence[tuple[Any, str, type[torch.nn.Module]]] | None = None,
    ) -> None:
        """Set what `apply_quant_modules` is to replace: the table and the custom map, without the names left float."""
        table = [*_DEFAULT_QUANT_MAP, *(QuantEntry(*entry) for entry in custom_map or ())]
        names = {entry.mod_name for entry in table}
        for name in float_module_list or ():
            if name not in names:
                warnings.warn(f"quant_modules: {unknown('float module', name, names)}", stacklevel=3)
        kept = [entry for entry in table if entry.mod_name not in (float_module_list or ())]
        self.entries = {(id(entry.orig_mod), entry.mod_name): entry for entry in kept}

    def apply_quant_modules(self) -> None:
        """Put the quantized classes in; those of an earlier call that are not to be replaced any more go back."""
        self.restore_float_modules()
        for key, entry in self.entries.items():
            original = getattr(entry.orig_mod, entry.mod_name)
            self.originals[key] = QuantEntry(entry.orig_mod, entry.mod_name, original)
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)

    def restore_float_modules(self) -> None:
        """Put the original classes back."""
        while self.originals:
            _, entry = self.originals.popitem()
            setattr(entry.orig_mod, entry.mod_name, entry.replace_mod)


_quant_module_helper_object = QuantModuleReplacementHelper()


def initialize(
    float_module_list: Sequence[str] | None = None,
    custom_quant_modules: Sequence[tuple[Any, str, type[torch.nn.Module]]] | None = None,
) -> None:
    """Let names of torch.nn stand for quantized layers; models that are built from now on have them.

    Called again, it replaces by the new arguments alone. Names that were imported earlier (`from torch.nn import Linear`) and
    models that exist are not touched: `qtoolkit.quant_modules.replace` converts those. While it is active
    `isinstance(layer, torch.nn.Conv2d)` is false for float layers, and classes derived from torch.nn.Conv2d are quantized.

    Args:
        float_module_list: Names that stay float, such as ["Linear"]. One that is not in the table is warned of.
        custom_quant_modules: Further classes as (module, "ClassName", quantized class).

    Example:
        >>> initialize(float_module_list=["Linear"])
        >>> type(torch.nn.Conv2d(3, 8, 3)).__name__, type(torch.nn.Linear(3, 8)).__name__
        ('QuantConv2d', 'Linear')
        >>> deactivate()
        >>> type(torch.nn.Conv2d(3, 8, 3)).__name__
        'Conv2d'
    """
    _quant_module_helper_object.prepare_state(float_module_list, custom_quant_modules)
    _quant_module_helper_object.apply_quant_modules()


def deactivate() -> None:
    """Give the names of torch.nn back to the float layers; called again, it does nothing."""
    _quant_module_helper_object.restore_float_modules()


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """Let quantizers compute what exporters turn into Q/DQ pairs, and check that they can.

    A quantizer that is not disabled must have 8 bits, an `amax` and no signed narrow range (`LegacyExportError`).

    Example:
        >>> quantizer = quant_nn.TensorQuantizer()
        >>> quantizer.amax = 127.0
        >>> with enable_onnx_export():
        ...     program = torch.export.export(quantizer, (torch.ones(2),))
        >>> "fake_quantize_per_tensor_affine" in str(program.graph)
        True
    """
    before = TensorQuantizer._enable_onnx_export
    TensorQuantizer._enable_onnx_export = True
    try:
        yield
    finally:
        TensorQuantizer._enable_onnx_export = before
