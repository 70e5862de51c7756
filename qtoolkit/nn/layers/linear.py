"""Linear layers."""

from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.ops.layer import Geometry


class QuantLinear(QuantWeighted, nn.Linear):
    """torch.nn.Linear with a quantized weight; `weight_spec`'s axis 0 is the output feature.

    Example:
        >>> QuantLinear(4, 2, weight_spec=qt.QuantSpec(axis=0))(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    FLOAT = nn.Linear
    KIND = "linear"

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        return F.linear(x, weight, bias)

    def geometry(self, x: Tensor, *args: object, **kwargs: object) -> Geometry | None:
        """Return the product for an op, or None for a single vector."""
        return Geometry() if x.dim() > 1 else None

    def takes_affine(self) -> bool:
        return True

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError if it holds a batch norm and the input is not 2-d: BatchNorm1d then normalizes dimension 1."""
        if (self._holds_batch_norm or self._holds_batch_norm_before) and x.dim() != 2:
            raise ValueError(
                f"QuantLinear: a batch norm that is folded into a linear layer needs inputs of 2 dimensions, got "
                f"{tuple(x.shape)}: BatchNorm1d then normalizes dimension 1, not the features. Pass example_inputs to prepare, "
                f"which show this. Leave it unfolded without them: "
                f"prepare(..., qconfig_mapping=QConfigMapping().set_module_name(<the batch norm>, None))."
            )
