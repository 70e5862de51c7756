"""The quantizers of `qtoolkit.compat.pytorch_quantization`, which this package recognizes without importing them."""

from torch import nn


class LegacyQuantizer(nn.Module):
    """The empty base class of those quantizers. qtoolkit's own calibration and conversion do not apply to them."""


def refuse_legacy_quantizers(model: nn.Module, what: str) -> None:
    """Raise TypeError if a model holds legacy quantizers; `what` names the function that does not support them."""
    found = [name for name, module in model.named_modules() if isinstance(module, LegacyQuantizer)]
    if found:
        raise TypeError(
            f"{what}: {found[0]!r} is a quantizer of qtoolkit.compat.pytorch_quantization, which has its own "
            f"calibration and export; use those, or replace the float model by qtoolkit.quant_modules (docs/migration.md)."
        )
