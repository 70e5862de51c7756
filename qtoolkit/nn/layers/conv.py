"""Convolutions in one, two and three dimensions."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.ops.layer import Geometry, convolution
from qtoolkit.running import running


def is_strided_pointwise(layer: Any) -> bool:
    """Return whether a convolution is a 1x1 one with a stride: the gradient of its weight may need `convolution`."""
    return bool(max(layer.kernel_size) == 1 < max(layer.stride))


def trains_strided_pointwise(layer: QuantWeighted, weight: Tensor) -> bool:
    """Return whether torch computes the gradient of the weight of such a layer."""
    return is_strided_pointwise(layer) and torch.is_grad_enabled() and weight.requires_grad and not running().recorded


class Convolution(QuantWeighted):
    """A convolution in any number of dimensions, transposed or not."""

    FUNCTION: ClassVar[Callable[..., Tensor]]

    # Of torch's own class, mixed in:
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class _QuantConv(Convolution):
    """A convolution in any number of dimensions, in any padding mode."""

    KIND = "conv"

    # Of torch's own class, mixed in:
    padding: str | tuple[int, ...]  # "same", "valid", or a tuple
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self.edges(), mode=self.padding_mode), "valid"
        if trains_strided_pointwise(self, weight):
            zeros = (0,) * len(self.stride)  # "same" is for layers without a stride
            sizes = zeros if isinstance(padding, str) else padding
            return convolution(x, weight, bias, Geometry(self.stride, sizes, self.dilation, zeros, False, self.groups))
        return self.FUNCTION(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def geometry(self, x: Tensor, *args: object, **kwargs: object) -> Geometry | None:
        """Return the convolution for an op, or None: for an input without a batch, or padding that is not by zeros alike."""
        if self.padding_mode != "zeros" or x.dim() != len(self.stride) + 2:
            return None
        padding = self.padding
        if isinstance(padding, str):
            edges = self.edges()
            if edges[::2] != edges[1::2]:
                return None
            padding = tuple(reversed(edges[::2]))
        return Geometry(self.stride, padding, self.dilation, (0,) * len(self.stride), False, self.groups)

    def takes_affine(self) -> bool:
        """Return whether no zeros are added to the input: they are zeros after the batch norm, not before it."""
        return self.padding_mode != "zeros" or not any(self.edges())

    def edges(self) -> list[int]:
        """Return the padding of each edge in the order of torch.nn.functional.pad, last dimension first."""
        if not isinstance(self.padding, str):
            totals = [2 * int(p) for p in self.padding]
        elif self.padding == "valid":
            totals = [0] * len(self.kernel_size)
        else:
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)]


class QuantConv1d(_QuantConv, nn.Conv1d):
    """torch.nn.Conv1d with a quantized weight; `weight_spec`'s axis 0 is the output channel."""

    FLOAT = nn.Conv1d
    FUNCTION = staticmethod(F.conv1d)


class QuantConv2d(_QuantConv, nn.Conv2d):
    """torch.nn.Conv2d with a quantized weight; `weight_spec`'s axis 0 is the output channel.

    Example:
        >>> QuantConv2d(3, 8, 3, weight_spec=qt.QuantSpec(axis=0))(torch.zeros(1, 3, 5, 5)).shape
        torch.Size([1, 8, 3, 3])
    """

    FLOAT = nn.Conv2d
    FUNCTION = staticmethod(F.conv2d)


class QuantConv3d(_QuantConv, nn.Conv3d):
    """torch.nn.Conv3d with a quantized weight; `weight_spec`'s axis 0 is the output channel."""

    FLOAT = nn.Conv3d
    FUNCTION = staticmethod(F.conv3d)
