"""The bias of a function with a weight, F.conv2d(x, weight, bias), as the target adds it."""

from torch import Tensor, nn

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.unregistered import Unregistered


class FunctionBias(nn.Module):
    """Rounds the bias of a function to the grid of its integer sums: the module of a node that a graph pass inserts.

    The layer computes the same as the function, with the weight's quantizer, and is linked to the input's quantizer.
    """

    def __init__(self, layer: QuantWeighted) -> None:
        super().__init__()
        self.link(layer)

    @property
    def layer(self) -> QuantWeighted:
        """The layer."""
        return self._layer.value

    def link(self, layer: QuantWeighted) -> None:
        """Take another layer, such as one with the frozen quantizers."""
        self._layer = Unregistered(layer)

    def forward(self, bias: Tensor) -> Tensor | None:
        """Return the bias on the grid, where there is one; gradients pass straight through."""
        return self.layer.bias_in_sums(bias)
