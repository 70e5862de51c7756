"""The base class of quantizers that shape their input before it is rounded to a uniform grid."""

from typing import TYPE_CHECKING

from torch import nn

from qtoolkit.quantizers.kinds.base import QuantizerKind

if TYPE_CHECKING:
    from qtoolkit.config import QuantSpec


class Shape(nn.Module):
    """Shapes a tensor before it is rounded, with constants: what a converted model keeps of such a quantizer.

    Attributes:
        why_no_export: Why a file of ONNX cannot have it for an activation, a sentence; None if it can. A weight in a file is
            shaped already.
    """

    why_no_export: str | None = None


class Shaped(QuantizerKind):
    """The input is shaped, then rounded to a uniform grid."""

    PLAIN = False

    def check(self, spec: "QuantSpec") -> None:
        """Raise ValueError for a spec without a symmetric grid of integers."""
        if spec.format != "int":
            raise ValueError(f"QuantSpec: format={spec.format!r} needs quantizer='fixed', got {spec.quantizer!r}.")
        if spec.pow2_scale:
            raise ValueError(
                f"QuantSpec: pow2_scale=True needs quantizer='fixed' or 'tqt', got {spec.quantizer!r}, whose steps have any "
                f"size."
            )
        if not spec.symmetric:
            raise ValueError(
                f"QuantSpec: quantizer={spec.quantizer!r} has no zero point: it needs symmetric=True, got False; take "
                f"'lsq_plus' or 'learned_range' for an affine grid."
            )

    def shapes(self, spec: "QuantSpec") -> bool:
        """Return True."""
        return True
