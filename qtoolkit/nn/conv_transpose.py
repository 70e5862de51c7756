"""Transposed convolutions: the weight is (in, out / groups, k...), so output channels run along groups and axis 1."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.config import QuantSpec
from qtoolkit.nn.weighted import QuantWeighted


class QuantConvTranspose2d(QuantWeighted, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with a quantized weight.

    Args:
        *args: As torch.nn.ConvTranspose2d takes them.
        weight_spec: Spec of the weight, or None. Axis 1 is the output channel: with groups it has one scale per output
            channel, (groups, out / groups). Axis 0 is the input channel.
        **kwargs: As torch.nn.ConvTranspose2d takes them.

    Example:
        >>> layer = QuantConvTranspose2d(4, 6, 2, stride=2, groups=2, weight_spec=QuantSpec(axis=1))
        >>> layer.weight_quantizer.scale.shape
        torch.Size([6])
        >>> layer(torch.zeros(1, 4, 5, 5), [11, 11]).shape
        torch.Size([1, 6, 11, 11])
    """

    FLOAT = nn.ConvTranspose2d

    def __init__(self, *args: Any, weight_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_quantizers(weight_spec, type(self).__name__)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        """Convolve; a further argument is output_size, as torch's layer takes it."""
        padding = self.output_padding_for(x, args[0] if args else None)
        edge = [int(p) for p in self.padding]
        return F.conv_transpose2d(x, weight, bias, self.stride, edge, padding, self.groups, self.dilation)

    def output_padding_for(self, x: Tensor, output_size: list[int] | None) -> list[int]:
        """Return the output padding that gives an output of the spatial size `output_size`.

        Raises:
            ValueError: No output padding gives that size.
        """
        if output_size is None:
            return [int(p) for p in self.output_padding]
        wanted = list(output_size)[-2:]
        padding = []
        for d, size in enumerate(wanted):
            reach = self.dilation[d] * (self.kernel_size[d] - 1) + 1
            smallest = (x.size(d - 2) - 1) * self.stride[d] - 2 * int(self.padding[d]) + reach
            if not smallest <= size < smallest + self.stride[d]:
                raise ValueError(
                    f"QuantConvTranspose2d: output_size must lie in [{smallest}, {smallest + self.stride[d] - 1}] in "
                    f"spatial dimension {d}, got {size}."
                )
            padding.append(size - smallest)
        return padding

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply each output channel, of each group, by its factor."""
        grouped = weight.reshape(self.groups, -1, *weight.shape[1:])
        return (grouped * factor.reshape(self.groups, 1, -1, *[1] * (weight.dim() - 2))).flatten(0, 1)

    def scale_groups(self, axis: int | None) -> int:
        """Return the groups, where scales run along the output channel."""
        return self.groups if axis is not None and axis % self.weight.dim() == 1 else 1
