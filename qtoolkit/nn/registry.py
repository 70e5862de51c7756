"""Tables of float type -> QAT type: what an entry must be, and how a layer is built from one."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from qtoolkit.config import QuantSpec
from qtoolkit.errors import shown, with_article
from qtoolkit.nn.weighted import QuantWeighted

QatModules = Mapping[type[nn.Module], type[Any]]

# QAT types of layers of packages that qtoolkit does not import: where the float type is, and where the QAT type is.
OF_PACKAGES = {("transformers.pytorch_utils", "Conv1D"): ("qtoolkit.nn.of_transformers", "QuantTransformersConv1D")}


def imported_types() -> dict[type[nn.Module], type[Any]]:
    """Return the QAT types of layers of other packages, as far as these have been imported."""
    found = {}
    for (package, name), (module, qat_name) in OF_PACKAGES.items():
        float_type = getattr(sys.modules.get(package), name, None)
        if float_type is not None:
            found[float_type] = getattr(import_module(module), qat_name)
    return found


def check_table(qat_modules: object, what: str = "prepare", argument: str = "qat_modules") -> None:
    """Raise TypeError unless an argument of the function `what` is a mapping of float types to types with `from_float`."""
    if not isinstance(qat_modules, Mapping):
        raise TypeError(
            f"{what}: {argument} must map float module types to QAT types, got {with_article(type(qat_modules))}."
        )
    for float_type, qat_type in qat_modules.items():
        for role, value in (("key", float_type), ("value", qat_type)):
            if not isinstance(value, type) or not issubclass(value, nn.Module):
                raise TypeError(
                    f"{what}: each {role} of {argument} must be a torch.nn.Module type, got {shown(value)}."
                )
        if not callable(getattr(qat_type, "from_float", None)):
            raise TypeError(
                f"{what}: {argument} maps {float_type.__name__} to {qat_type.__name__}, which has no class method "
                f"from_float(module, weight, name, activation); derive it from qtoolkit.nn.QuantWeighted or QuantModule."
            )


def weighted_types(table: QatModules) -> set[type[nn.Module]]:
    """Return the float types of layers with one weight."""
    return {float_type for float_type, qat_type in table.items() if issubclass(qat_type, QuantWeighted)}


def from_float(
    module: nn.Module,
    qat_type: type[Any],
    weight: QuantSpec | None,
    activation: QuantSpec | None,
    name: str,
    what: str = "prepare",
) -> nn.Module:
    """Return the QAT module of a float one; TypeError, which begins with `what`, if the type's `from_float` returns none."""
    new = qat_type.from_float(module, weight, name, activation)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"{what}: {qat_type.__name__}.from_float must return a torch.nn.Module for {name!r}, got {type(new).__name__}."
        )
    return new
