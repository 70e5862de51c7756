"""Quantizers of other packages, which a model may hold, and to which qtoolkit's own steps do not apply."""

from typing import ClassVar

from torch import nn


class ForeignQuantizer(nn.Module):
    """The base class of quantizers that have a calibration, a conversion and an export of their own.

    Attributes:
        PACKAGE: The package that has these, for errors and reports.
    """

    PACKAGE: ClassVar[str]


def refuse_foreign_quantizers(model: nn.Module, what: str) -> None:
    """Raise TypeError if a model holds such quantizers; `what` names the function that does not support them."""
    for name, module in model.named_modules():
        if isinstance(module, ForeignQuantizer):
            raise TypeError(
                f"{what}: {name!r} is a quantizer of {module.PACKAGE}, which has its own calibration and export; use those, "
                f"or replace the float model by qtoolkit.quant_modules (docs/migration.md)."
            )
