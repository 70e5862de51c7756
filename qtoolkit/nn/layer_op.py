"""The op of a type of layers, and how the output channels lie in its weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qtoolkit.ops.layer import Geometry
from qtoolkit.quantizers.quantizer import Quantizer


class LayerOp:
    """The float op of a layer with one weight. Subclasses override methods that differ from a linear layer's."""

    OUTPUT_AXIS: ClassVar[int] = 0  # of the weight's dimensions, the one along which the output channels run
    layers = 1  # the layers, of equal numbers of output channels, that share the weight

    weight: Any  # a Parameter, and a Parameter or None: torch's classes declare them differently
    bias: Any
    weight_quantizer: Quantizer | None
    updated_channels: Tensor | None  # the channels whose weights get gradients in training, int64; None for all

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the float layer with this weight and bias."""
        raise NotImplementedError

    def geometry(self, x: Tensor, *args: Any, **kwargs: Any) -> Geometry | None:
        """Return the geometry of the layer for this input, for an op; None where only `compute` can compute it."""
        return None

    @classmethod
    def has_geometry(cls) -> bool:
        """Return whether an op can compute such a layer."""
        return cls.geometry is not LayerOp.geometry

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError if, for this input, the batch norm normalizes another dimension than the layer's output channels."""

    # ---- the channels that are updated

    def update_channels(self, channels: Tensor | None) -> None:
        """Let only these output channels, in order, give gradients to the weight; None for all."""
        raise NotImplementedError

    def updated(self, values: Tensor) -> Tensor:
        """Return one value for each output channel, with a gradient in the channels that are updated."""
        if self.updated_channels is None:
            return values
        return torch.where(self._is_updated(self.updated_channels), values, values.detach())

    def updated_weight(self, weight: Tensor) -> Tensor:
        """Return a tensor like the weight, with a gradient in the channels that are updated."""
        if self.updated_channels is None:
            return weight
        mask = self._is_updated(self.updated_channels).to(weight.dtype)
        return torch.where(self.scale_output_channels(torch.ones_like(weight), mask) > 0, weight, weight.detach())

    def _is_updated(self, channels: Tensor) -> Tensor:
        return torch.zeros(self.channels(), dtype=torch.bool, device=channels.device).index_fill(0, channels, True)

    # ---- the weight

    def channels(self) -> int:
        """Return the number of output channels."""
        return int(self.weight.size(0))

    def sum_per_output(self, values: Tensor) -> Tensor:
        """Return the sum, for each output channel, of the elements of a tensor like the weight, in float64."""
        return values.flatten(1).sum(1, dtype=torch.float64)

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each output channel of a weight by its factor."""
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))

    def takes_affine(self) -> bool:
        """Return whether a factor and a shift of each input channel can be folded into weight and bias."""
        return False

    def input_channels(self) -> int:
        """Return the number of input channels of a weight (out, in / groups, k...)."""
        return int(self.weight.size(1)) * int(getattr(self, "groups", 1))

    def scale_input_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each input channel of a weight (out, in / groups, k...) by its factor."""
        groups, outputs, inputs = int(getattr(self, "groups", 1)), weight.size(0), weight.size(1)
        of_group = factor.reshape(groups, 1, inputs).expand(groups, outputs // groups, inputs)
        return weight * of_group.reshape(outputs, inputs, *[1] * (weight.dim() - 2))

    def along_channels(self, values: Tensor) -> Tensor:
        """Shape one value per output channel to broadcast over an output."""
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def weight_groups(self) -> tuple[bool, int]:
        """Return whether the weight is transposed, (in, out / groups, k...), and with how many groups."""
        return False, 1

    def scale_groups(self, axis: int | None) -> int:
        """Return the `group` argument of ops on the weight with scales along an axis."""
        return 1

    def scales_along_outputs(self) -> bool:
        """Return whether the weight has one scale, or one per output channel."""
        if self.weight_quantizer is None:
            return False
        spec = self.weight_quantizer.spec
        return spec.group_size is None and (spec.axis is None or spec.axis % self.weight.dim() == self.OUTPUT_AXIS)


def put_channels(module: nn.Module, name: str, channels: Tensor | None, device: torch.device) -> None:
    """Set a buffer of channels; in place if their number is unchanged, because recorded CUDA graphs read them."""
    now = module._buffers[name]
    if now is not None and channels is not None and now.shape == channels.shape:
        now.copy_(channels)
    else:
        module._buffers[name] = None if channels is None else channels.to(device, copy=True)
