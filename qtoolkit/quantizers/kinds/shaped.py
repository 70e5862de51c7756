"""The base class of quantizers that shape their input before it is rounded to a uniform grid."""

from torch import nn

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.kinds.rules import needs_any_scale, needs_integers, needs_no_zero_point


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
    RULES = (needs_integers, needs_any_scale, needs_no_zero_point)

    def shapes(self, spec: QuantSpec) -> bool:
        """Return True."""
        return True
