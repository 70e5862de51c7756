"""A layer with a quantized input and weight in one op."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtoolkit._native import Op, library

_quant_layer: Op = library.quant_layer.default
_quant_weight: Op = library.quant_weight.default
_convolution: Op = library.convolution.default


@dataclass(frozen=True)
class Codes:
    """A tensor's place on an integer grid with one scale.

    Attributes:
        codes: The tensor as integers, int8 or uint8 and of its shape; or two integers per byte, as
            `qtoolkit.ops.quantize_int4` returns them; or, for an image (N, C, H, W), uint8 (N, C / 2, H, W) with
            channel 2i in the low half of channel i.
        scale: The step size, without a gradient.
        zero_point: The integer that zero maps to, or None for 0.
        qmin: The lowest quantized value.
        qmax: The highest quantized value.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    qmin: int
    qmax: int

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest quantized value, as ops take them."""
        return self.qmin, self.qmax


@dataclass(frozen=True)
class WeightGrid:
    """How a weight is fake-quantized, with the arguments of `qtoolkit.ops.fake_quant`."""

    scale: Tensor
    zero_point: Tensor | None
    qmin: int
    qmax: int
    axis: int | None = None
    group: int = 1
    block_size: int = 0
    grad_factor: float = 1.0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its fields in one list, as ops take them (csrc/layer/layer.h)."""
        axis = () if self.axis is None else (self.axis,)
        return self.qmin, self.qmax, self.group, self.block_size, *axis


@dataclass(frozen=True)
class Geometry:
    """The geometry of a layer: with no stride a linear layer, otherwise a convolution with the arguments of torch's."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    transposed: bool = False
    groups: int = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The same in one list, as ops take it (csrc/layer/layer.h).

        Raises:
            ValueError: The fields are not of one number of spatial dimensions.
        """
        sides = self.stride, self.padding, self.dilation, self.output_padding
        if any(len(side) != len(self.stride) for side in sides):
            raise ValueError(
                f"Geometry: stride, padding, dilation and output_padding must have one number for each spatial dimension, got "
                f"{', '.join(map(str, sides))}."
            )
        stride, padding, dilation, output_padding = sides
        return self.groups, int(self.transposed), *stride, *padding, *dilation, *output_padding


@dataclass(frozen=True)
class RawInput:
    """The input of a layer before it was fake-quantized, where only its scale is trained.

    Attributes:
        values: The tensor, without a gradient.
        scale: Its scale, one element, with a gradient.
        grad_factor: Multiplies that gradient.
    """

    values: Tensor
    scale: Tensor
    grad_factor: float = 1.0


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return torch's convolution, with the same bits, whose gradients torch computes within their memory.

    The gradient of the weight of a 1x1 convolution with a stride is wrong in torch, and destroys the heap, for fewer than 16
    channels in channels_last on the CPU (docs/troubleshooting.md).

    Example:
        >>> geometry = Geometry((2, 2), (0, 0), (1, 1), (0, 0))
        >>> convolution(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 1, 1), None, geometry).shape
        torch.Size([1, 4, 4, 4])
    """
    if x.dim() == weight.dim() - 1:
        return convolution(x.unsqueeze(0), weight, bias, geometry).squeeze(0)
    g = geometry
    return _convolution(x, weight, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups)


def quant_weight(
    weight: Tensor,
    grid: WeightGrid,
    factor: Tensor | None = None,
    transposed: bool = False,
    groups: int = 1,
    updated: Tensor | None = None,
) -> Tensor:
    """Return the weight of a layer, multiplied by a factor for each output channel and fake-quantized.

    The values are `fake_quant(weight * factor)`, bit for bit. On the CPU, one read of the weight gives them, and one
    read of the weight and the incoming gradient all gradients.

    `updated` has the indices of the output channels, int64, in which weight, factor and scale have a gradient; None for all.

    Example:
        >>> grid = WeightGrid(torch.tensor(0.5), None, -127, 127)
        >>> quant_weight(torch.tensor([[0.3, 1.0], [0.3, 1.0]]), grid, torch.tensor([1.0, 2.0]))
        tensor([[0.5000, 1.0000],
                [0.5000, 2.0000]])
    """
    return _quant_weight(*_of_weight(weight, grid, factor, updated), transposed, groups)


def _of_weight(weight: Tensor, grid: WeightGrid, factor: Tensor | None, updated: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of ops for a weight, in the order of their schemas."""
    return weight, factor, grid.scale, grid.zero_point, grid.numbers, grid.grad_factor, updated


def quant_layer(
    x: Tensor,
    codes: Codes,
    weight: Tensor,
    grid: WeightGrid,
    geometry: Geometry,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    integer: bool = False,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    raw: RawInput | None = None,
    updated: Tensor | None = None,
) -> Tensor:
    """Return a layer of x with the weight `quant_weight(weight, grid, factor)`, keeping little for backward.

    Output and gradients are the same as of `quant_weight` followed by torch's layer, bit for bit, except for the gradient
    of an image (at most 4 channels) that a 2-d convolution with a stride reads on the CPU: it is computed as a convolution of
    its own, several times as fast, and rounds otherwise. Backward keeps x as integers, 1 byte an element (half a byte if they
    are packed), and the weight as it is, not its quantized values.

    With `integer`, the sums of products are exact integer sums: by torch's int8 kernels for convolutions and
    linear layers on the CPU, by products of int8 matrices for layers without groups on a GPU, in float on integers elsewhere.
    The output differs from the composition's by rounding alone; a NaN in x makes every result NaN, one in the weight all of its
    output channel. The gradients are the straight-through ones of the composition, computed in channels_last. The weight's
    grid has no zero point, integers that fit in int8, and one scale or one per output channel.

    With `raw`, the tensor before it was fake-quantized, x has no gradient, and the scale gets its own from the gradient of the
    weight for another input, which takes less time for an image: the sum of the same terms in another order.

    `updated` has the indices of the output channels, int64, in which the weight has a gradient, and with it the factor and the
    scale; None for all. Without groups, only these channels of the gradient are computed. The gradient of x is whole.

    x lies on the grid of `codes`: (N, C, ...) with one to three spatial dimensions, or (N, ..., features) for a linear layer;
    float32, float64, bfloat16 or float16. The weight has torch's shape. `dtype` is the type to compute in, as under autocast,
    and `memory_format` the output's, of a 2-d convolution. The scale and zero point of x have no gradient.

    Example:
        >>> x = qt.ops.fake_quant(torch.rand(1, 2, 4, 4), torch.tensor(0.01))
        >>> codes = Codes(qt.ops.quantize(x, torch.tensor(0.01)), torch.tensor(0.01), None, -128, 127)
        >>> grid = WeightGrid(torch.tensor(0.02), None, -127, 127)
        >>> weight = torch.rand(3, 2, 3, 3, requires_grad=True)
        >>> y = quant_layer(x, codes, weight, grid, Geometry((1, 1), (0, 0), (1, 1), (0, 0)))
        >>> bool((y == torch.conv2d(x, qt.ops.fake_quant(weight, torch.tensor(0.02), None, -127, 127))).all())
        True
    """
    x, of_raw = (x, (None, None, 1.0)) if raw is None else (x.detach(), (raw.values, raw.scale, raw.grad_factor))
    of_x, of_weight = (
        (codes.codes, codes.scale, codes.zero_point, codes.range),
        _of_weight(weight, grid, factor, updated),
    )
    return _quant_layer(x, bias, *of_x, *of_weight, geometry.numbers, integer, dtype, memory_format, *of_raw)
