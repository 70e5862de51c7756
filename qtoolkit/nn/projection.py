"""Linear layers in a module that holds their weights, as training computes them."""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn import on_codes
from qtoolkit.nn.layers.linear import QuantLinear
from qtoolkit.nn.module import quantized
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.ops.layer import Geometry
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.quantizer import Quantizer

if TYPE_CHECKING:
    from qtoolkit.nn.attention import QuantMultiheadAttention


class Projection:
    """A linear layer of an attention, for one call: what `qtoolkit.nn.on_codes` asks of a layer.

    Args:
        attention: The attention.
        weight: Its weight, (out, in).
        quantizer: The weight's quantizer, or None.
        bias: Its bias, or None.
        source: The quantizer on whose grid its input lies, or None where that is not known.
    """

    FLOAT: ClassVar[type[nn.Module]] = nn.Linear
    OP_KIND: ClassVar[OpKind] = QuantLinear.OP_KIND
    OUTPUT_AXIS: ClassVar[int] = QuantLinear.OUTPUT_AXIS
    returns_channels_last: ClassVar[bool] = False
    batch_norm = integer_kernel = input_quantizer = None

    def __init__(
        self,
        attention: "QuantMultiheadAttention",
        weight: Tensor,
        quantizer: Quantizer | None,
        bias: Tensor | None,
        source: Quantizer | None,
    ) -> None:
        self.training, self.training_arithmetic = attention.training, attention.training_arithmetic
        self.weight, self.weight_quantizer, self.bias, self.source = weight, quantizer, bias, source

    def __call__(self, x: Tensor, known: TensorCodes | None) -> Tensor:
        """Return the layer of x, of which this is known: in training by an op that keeps codes, where it has some."""
        y = on_codes.run(self, x, None, self.bias, (), {}, known=known)
        if y is not None:
            return y
        weight = on_codes.quantized_weight(self, None)
        return self.compute(x, quantized(self.weight_quantizer, self.weight) if weight is None else weight, self.bias)

    @staticmethod
    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer."""
        return F.linear(x, weight, bias)

    def check_input(self, x: Tensor) -> None:
        """Do nothing: no batch norm is behind it."""

    def sum_steps(self) -> None:
        """Return None: the bias is added in float."""

    def source_of(self, call: int) -> Quantizer | None:
        """Return the source."""
        return self.source

    def bias_in_sums(self, bias: Tensor | None, call: int = 0) -> Tensor | None:
        """Return the bias, which an attention adds in float."""
        return bias

    def geometry(self, x: Tensor) -> Geometry | None:
        """Return the product for an op, or None for a single vector."""
        return Geometry() if x.dim() > 1 else None

    def has_geometry(self) -> bool:
        """Return whether an op can compute the layer."""
        return True

    def weight_groups(self) -> tuple[bool, int]:
        """Return that the weight is not transposed, without groups."""
        return False, 1

    def channels(self) -> int:
        """Return the number of output features."""
        return int(self.weight.size(0))

    def scales_along_outputs(self) -> bool:
        """Return whether the weight has one scale, or one per output feature."""
        quantizer = self.weight_quantizer
        return quantizer is not None and on_codes.along_outputs(quantizer.spec, self.weight, self.OUTPUT_AXIS)
