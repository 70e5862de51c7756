"""Modules of MQBench without an adapter: importing a name from one raises an error that names the alternative."""

import sys
from types import ModuleType
from typing import NoReturn

WAYS = {
    "advanced_ptq": "use qtoolkit.tuning.reconstruct(prepared, batches) in place of ptq_reconstruction",
    "custom_quantizer": "a qtoolkit.Backend determines which ops are quantized; pass it to qtoolkit.prepare",
    "fake_quantize": "choose the quantizer with qtoolkit.QuantSpec(quantizer=...)",
    "mix_precision": "use qtoolkit.tuning.mixed_precision to choose the bits of each layer",
    "observer": "choose the observer with qtoolkit.QuantSpec(observer=...)",
    "utils.profiling": "use qtoolkit.debug.compare to compare the layers of a float and a quantized model",
    "utils.registry": "pass qat_modules and fuse_patterns to qtoolkit.prepare",
    "weight_equalization": "use qtoolkit.tuning.equalize",
}


class Absent(ModuleType):
    """A module without an adapter, by its name in MQBench's package.

    Example:
        >>> Absent("mqbench", "observer").MinMaxObserver
        Traceback (most recent call last):
        ...
        ImportError: mqbench.observer has no adapter here, so 'MinMaxObserver' is missing: ...
    """

    def __init__(self, package: str, name: str) -> None:
        super().__init__(f"{package}.{name}", f"{WAYS[name]}.")
        self.name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raise ImportError with the alternative; AttributeError for names that Python itself looks up."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ImportError(
            f"mqbench.{self.name} has no adapter here, so {attribute!r} is missing: {WAYS[self.name]} (docs/migration.md)."
        )


def add_absent(package: str) -> None:
    """Make imports and attributes of the modules without an adapter raise these errors."""
    for name in WAYS:
        module = sys.modules.setdefault(f"{package}.{name}", Absent(package, name))
        home, _, own_name = module.__name__.rpartition(".")
        setattr(sys.modules[home], own_name, module)
