"""A soft staircase in training (DSQ)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.kinds.clipped import Clipped
from qtoolkit.quantizers.spec_ops import straight_through

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

LEAST_ALPHA, LARGEST_ALPHA = 1e-3, 0.5


class DSQ(Clipped):
    """The gradient is that of a soft staircase, whose steepness is trained with the range (DSQ, arXiv 1908.05033).

    Between two codes, at f in [0, 1] of the step, the soft staircase is (tanh(k (f - 1/2)) / (1 - alpha) + 1) / 2 with
    k = log(2 / alpha - 1): the smaller alpha, the nearer to the hard one. Forward values are those of the hard staircase. The
    gradients of the bounds are those of the elements beyond them. Alpha starts at the option `alpha`, and stays within
    [0.001, 0.5].
    """

    label = "dsq"
    OPTIONS = {"alpha": 0.2}

    def check(self, spec: QuantSpec) -> None:
        """Raise ValueError for an alpha out of its range."""
        super().check(spec)
        alpha = self.options(spec)["alpha"]
        if not isinstance(alpha, int | float) or not LEAST_ALPHA <= alpha <= LARGEST_ALPHA:
            raise ValueError(
                f"QuantSpec: alpha of quantizer={spec.quantizer!r} must lie in [{LEAST_ALPHA}, {LARGEST_ALPHA}], got {alpha!r}."
            )

    def parameters(self, spec: QuantSpec) -> Mapping[str, float]:
        """Return those of the bounds, and alpha."""
        return {**super().parameters(spec), "_alpha": float(self.options(spec)["alpha"])}

    def steepness(self, quantizer: "TensorQuantizer") -> Tensor:
        """Return k."""
        alpha = quantizer._alpha.clamp(LEAST_ALPHA, LARGEST_ALPHA)
        return torch.log(2 / straight_through(alpha, quantizer._alpha) - 1)
