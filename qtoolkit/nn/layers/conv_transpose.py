"""Transposed convolutions: the weight is (in, out / groups, k...), so output channels run along groups and axis 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn.layers.conv import Convolution, trains_strided_pointwise
from qtoolkit.ops.layer import Geometry, convolution


class _QuantConvTranspose(Convolution):
    """A transposed convolution in any number of dimensions."""

    KIND = "conv_transpose"
    OUTPUT_AXIS = 1

    # Of torch's own class, mixed in:
    padding: Any  # a tuple of numbers; "same" and "valid" are not supported
    output_padding: tuple[int, ...]

    def compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        extra = self.output_padding_for(x, output_size)
        if trains_strided_pointwise(self, weight):
            sizes = self.stride, self.padding, self.dilation, tuple(extra)
            return convolution(x, weight, bias, Geometry(*sizes, True, self.groups))
        return self.FUNCTION(x, weight, bias, self.stride, self.padding, extra, self.groups, self.dilation)

    def geometry(self, x: Tensor, output_size: Sequence[int] | None = None) -> Geometry | None:
        """Return the transposed convolution for an op, or None for an input without a batch."""
        if x.dim() != self.weight.dim():
            return None
        extra = tuple(self.output_padding_for(x, output_size))
        return Geometry(self.stride, self.padding, self.dilation, extra, True, self.groups)

    def output_padding_for(self, x: Tensor, output_size: Sequence[int] | None = None) -> list[int]:
        """Return the output padding that gives this size of the spatial dimensions, or of all; by default the layer's own.

        Raises ValueError: no output padding gives that size.
        """
        if output_size is None:
            return list(self.output_padding)
        dims = len(self.kernel_size)
        if len(output_size) not in (dims, x.dim()):
            raise ValueError(
                f"{type(self).__name__}: output_size must have {dims} or {x.dim()} elements, got {len(output_size)}."
            )
        smallest = [self._smallest_size(d, x.size(d - dims)) for d in range(dims)]
        return [self._extra(d, smallest[d], size) for d, size in enumerate(list(output_size)[-dims:])]

    def _smallest_size(self, d: int, size: int) -> int:
        reach = self.dilation[d] * (self.kernel_size[d] - 1) + 1
        return (size - 1) * self.stride[d] - 2 * int(self.padding[d]) + reach

    def _extra(self, d: int, smallest: int, wanted: int) -> int:
        if not smallest <= wanted < smallest + self.stride[d]:
            raise ValueError(
                f"{type(self).__name__}: output_size must lie in [{smallest}, {smallest + self.stride[d] - 1}] in "
                f"spatial dimension {d}, got {wanted}."
            )
        return wanted - smallest

    def channels(self) -> int:
        return int(self.weight.size(1)) * self.groups

    def sum_per_output(self, values: Tensor) -> Tensor:
        grouped = values.reshape(self.groups, -1, values.size(1), *values.shape[2:])
        return grouped.flatten(3).sum((1, 3), dtype=torch.float64).flatten()

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        grouped = weight.reshape(self.groups, -1, *weight.shape[1:])
        return (grouped * factor.reshape(self.groups, 1, -1, *[1] * (weight.dim() - 2))).flatten(0, 1)

    def weight_groups(self) -> tuple[bool, int]:
        return True, self.groups

    def scale_groups(self, axis: int | None) -> int:
        return self.groups if axis is not None and axis % self.weight.dim() == 1 else 1


class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with a quantized weight; axes as in QuantConvTranspose2d."""

    FLOAT = nn.ConvTranspose1d
    FUNCTION = staticmethod(F.conv_transpose1d)


class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with a quantized weight.

    Axis 1 of `weight_spec` is the output channel: with groups it has one scale per output channel, (groups, out / groups).
    Axis 0 is the input channel.

    Example:
        >>> layer = QuantConvTranspose2d(4, 6, 2, stride=2, groups=2, weight_spec=qt.QuantSpec(axis=1))
        >>> layer.weight_quantizer.scale.shape
        torch.Size([6])
        >>> layer(torch.zeros(1, 4, 5, 5), [11, 11]).shape
        torch.Size([1, 6, 11, 11])
    """

    FLOAT = nn.ConvTranspose2d
    FUNCTION = staticmethod(F.conv_transpose2d)


class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with a quantized weight; axes as in QuantConvTranspose2d."""

    FLOAT = nn.ConvTranspose3d
    FUNCTION = staticmethod(F.conv_transpose3d)
