"""Views of a layer's weight by output and input channels, for all types of layers."""

from typing import Any

import torch
from torch import Tensor

from qtoolkit.op_kinds.table import OF_MODULE

LAYERS = tuple(module for module, (kind, _) in OF_MODULE.items() if kind.layer)


class ChannelView:
    """A layer's weight as (groups, outputs, inputs, kernel); channel values and factors have one entry per channel.

    `dims` is the number of dimensions of the positions.

    Example:
        >>> view = ChannelView(torch.nn.ConvTranspose2d(4, 6, 3, groups=2))
        >>> view.outputs_amax().shape, view.inputs_amax().shape
        (torch.Size([6]), torch.Size([4]))
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.transposed = OF_MODULE[type(layer)][0].transposed
        self.groups: int = getattr(layer, "groups", 1)
        self.dims: int = layer.weight.dim() - 2

    def _grouped(self) -> Tensor:
        """Return the values of the weight, (groups, outputs, inputs, kernel)."""
        weight: Tensor = self.layer.weight.detach()
        view = (
            weight.reshape(self.groups, -1, *weight.shape[1:]).flatten(3)
            if weight.dim() > 2
            else weight[None, ..., None]
        )
        return view.transpose(1, 2) if self.transposed else view

    def outputs_amax(self) -> Tensor:
        """Return the largest magnitude of each output channel."""
        return self._grouped().abs().amax((2, 3)).flatten()

    def inputs_amax(self) -> Tensor:
        """Return the largest magnitude of each input channel."""
        return self._grouped().abs().amax((1, 3)).flatten()

    def multiply_outputs(self, factor: Tensor) -> None:
        """Multiply each output channel by its factor."""
        self._multiply(factor.reshape(self.groups, -1, 1, 1))

    def multiply_inputs(self, factor: Tensor) -> None:
        """Multiply each input channel by its factor."""
        self._multiply(factor.reshape(self.groups, 1, -1, 1))

    def _multiply(self, factor: Tensor) -> None:
        """Multiply the weight in place by a factor in the shape of its groups; its memory may not be contiguous."""
        with torch.no_grad():
            full = factor.expand(self._grouped().shape)
            full = full.transpose(1, 2) if self.transposed else full
            self.layer.weight.mul_(full.reshape(self.layer.weight.shape))
