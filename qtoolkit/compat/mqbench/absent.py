"""Modules of MQBench that have no adapter: each name that a script imports from one says what to use instead."""

import sys
from types import ModuleType
from typing import NoReturn

WAYS = {
    "advanced_ptq": "qtoolkit.tuning.reconstruct(prepared, batches) learns the rounding of weights, as ptq_reconstruction does",
    "custom_quantizer": "a qtoolkit.Backend says which ops are quantized; pass it to qtoolkit.prepare",
    "fake_quantize": "qtoolkit.QuantSpec(quantizer=...) names the quantizer",
    "mix_precision": "qtoolkit.tuning.mixed_precision chooses the bits of each layer",
    "observer": "qtoolkit.QuantSpec(observer=...) names the observer",
    "utils.profiling": "qtoolkit.debug.compare compares the layers of a float and a quantized model",
    "utils.registry": "qtoolkit.prepare takes qat_modules and fuse_patterns",
    "weight_equalization": "qtoolkit.tuning.equalize does it",
}


class Absent(ModuleType):
    """A module, by its name in the package that has the adapters, that is not here.

    Example:
        >>> Absent("mqbench", "observer").MinMaxObserver
        Traceback (most recent call last):
        ...
        ImportError: mqbench.observer has no adapter here, and so no 'MinMaxObserver': ...
    """

    def __init__(self, package: str, name: str) -> None:
        super().__init__(f"{package}.{name}", f"{WAYS[name]}.")
        self.name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raise ImportError with the way here; AttributeError for what Python itself asks for."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ImportError(
            f"mqbench.{self.name} has no adapter here, and so no {attribute!r}: {WAYS[self.name]} (docs/migration.md)."
        )


def add_absent(package: str) -> None:
    """Let imports from the modules that have no adapter raise these errors, and what is read of them."""
    for name in WAYS:
        module = sys.modules.setdefault(f"{package}.{name}", Absent(package, name))
        home, _, own_name = module.__name__.rpartition(".")
        setattr(sys.modules[home], own_name, module)
