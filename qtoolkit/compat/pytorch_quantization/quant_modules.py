"""pytorch_quantization.quant_modules: while it is active, names of torch.nn refer to quantized layers.

For new work use `qtoolkit.quant_modules`, which patches constructors and does not change the names of torch.nn. The adapter
rebinds names because scripts rely on it: they compare `torch.nn.Conv2d` with `quant_nn.QuantConv2d`, derive from it, pass
`quant_desc_input` to it, and rebind names of other modules with `custom_quant_modules`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from qtoolkit.errors import unknown, warn
from qtoolkit.graph.capture.functions import patched

_Custom = Sequence[tuple[object, str, type[torch.nn.Module]]]


class QuantEntry(NamedTuple):
    """A name to rebind: its module (or namespace), the name, and the new class."""

    orig_mod: object
    mod_name: str
    replace_mod: type[torch.nn.Module]


_FLOAT = ("QuantMaxPool", "QuantInstanceNorm")  # quantized classes that initialize() does not use
_DEFAULT_QUANT_MAP = [
    QuantEntry(torch.nn, name.removeprefix("Quant"), cls)
    for name, cls in quant_nn.QUANTIZED.items()
    if not name.startswith(_FLOAT)
]


class QuantModuleReplacementHelper:
    """The names to rebind, and the original classes."""

    def __init__(self) -> None:
        self.entries: list[QuantEntry] = []
        self.originals: list[QuantEntry] = []

    def prepare_state(self, float_module_list: Sequence[str] | None = None, custom_map: _Custom | None = None) -> None:
        """Set the names that `apply_quant_modules` rebinds: the table without float modules, plus the custom map."""
        stay_float, names = float_module_list or (), {entry.mod_name for entry in _DEFAULT_QUANT_MAP}
        for name in stay_float:
            if name not in names:
                warn(f"quant_modules: {unknown('float module', name, names)}")
        table = [entry for entry in _DEFAULT_QUANT_MAP if entry.mod_name not in stay_float]
        self.entries = [*table, *(QuantEntry(*entry) for entry in custom_map or ())]

    def apply_quant_modules(self) -> None:
        """Restore the names of an earlier call, then rebind the names."""
        self.restore_float_modules()
        for module, name, cls in self.entries:
            self.originals.append(QuantEntry(module, name, getattr(module, name)))
            setattr(module, name, cls)

    def restore_float_modules(self) -> None:
        """Restore the original classes."""
        while self.originals:
            module, name, cls = self.originals.pop()
            setattr(module, name, cls)


_quant_module_helper_object = QuantModuleReplacementHelper()


def initialize(float_module_list: Sequence[str] | None = None, custom_quant_modules: _Custom | None = None) -> None:
    """Make names of torch.nn refer to quantized layers, for models that are built afterwards.

    A second call replaces the arguments of the first. Names that were imported earlier (`from torch.nn import Linear`) and
    existing models do not change; convert existing models with `qtoolkit.quant_modules.replace`. While it is active,
    `isinstance(layer, torch.nn.Conv2d)` is false for float layers, and classes derived from torch.nn.Conv2d are quantized.

    Args:
        float_module_list: Names that stay float, such as ["Linear"]. Unknown names cause a warning.
        custom_quant_modules: Further names to rebind, as (module, "ClassName", quantized class). They take precedence over
            `float_module_list` and the table.

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
    """Restore the names of torch.nn; a second call has no effect."""
    _quant_module_helper_object.restore_float_modules()


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """Make quantizers use ops that exporters turn into Q/DQ pairs, and check that this is possible.

    Each enabled quantizer must have 8 bits, an `amax`, and narrow_range=False if it is signed (`LegacyExportError`).

    Example:
        >>> quantizer = quant_nn.TensorQuantizer()
        >>> quantizer.amax = 127.0
        >>> with enable_onnx_export():
        ...     program = torch.export.export(quantizer, (torch.ones(2),))
        >>> "fake_quantize_per_tensor_affine" in str(program.graph)
        True
    """
    with patched([(TensorQuantizer, "_enable_onnx_export", True)]):
        yield
