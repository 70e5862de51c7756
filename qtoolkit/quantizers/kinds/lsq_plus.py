"""A trained scale and offset (LSQ+)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.lsq import LSQ
from qtoolkit.quantizers.spec_ops import straight_through, trained_by_ratio

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


class LSQPlus(LSQ):
    """Scale s and offset beta are trained (LSQ+, arXiv 2004.09576): y = s clamp(round((x - beta) / s), qmin, qmax) + beta.

    The zero point, -beta / s, is rounded, since deployed grids have integers there, and stays within the codes. Both start
    at the least squared error, as in the paper, or from the range of another observer than "minmax".
    The parameter of the offset is its ratio to the scale at the start, and is trained like that of the scale.
    """

    label = "lsq+"

    def check(self, spec: QuantSpec) -> None:
        """Raise ValueError for a spec without a zero point."""
        super().check(spec)
        if spec.symmetric:
            raise ValueError(
                f"QuantSpec: quantizer={spec.quantizer!r} trains the zero point: it needs symmetric=False, got True; take "
                f"'lsq' for a symmetric grid, as the paper does for weights."
            )

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return that of LSQ, and the ratio of the offset to the scale at the start."""
        return {**super().parameters(spec), "_relative_offset": 0.0}

    def set_grid(self, quantizer: "TensorQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        """Store the scale as the start, and the offset."""
        super().set_grid(quantizer, scale, zero_point)
        if quantizer._zero_point is not None:
            quantizer._relative_offset.copy_(-quantizer._zero_point.reshape(quantizer._relative_offset.shape))

    def start(self, quantizer: "TensorQuantizer") -> None:
        """Return None: the zero point is computed too."""

    def grid(self, quantizer: "TensorQuantizer") -> tuple[Tensor, Tensor | None]:
        """Return the trained scale, and the zero point at the trained offset."""
        spec = quantizer.spec
        scale, _ = super().grid(quantizer)
        offset = trained_by_ratio(quantizer._scale, quantizer._relative_offset, quantizer._rate).reshape(scale.shape)
        zero_point = -offset / scale
        return scale, straight_through(zero_point.clamp(spec.qmin, spec.qmax), zero_point)
