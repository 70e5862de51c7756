"""torch's int8 convolutions and matrix products on the CPU, for layers of converted models.

csrc/layer/onednn.h has them. `int8_sums` returns None where torch lacks them, or where a trial shows that their sums are not
exact, as on processors without VNNI, whose int8 products saturate; sums are then computed in float32 and float64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtoolkit.ops.sums import is_exact

# (unsigned codes, their zero point) -> sums of products of codes minus the zero point, rounded to float32
Int8Sums = Callable[[Tensor, int], Tensor]


def int8_sums(layer: Any, weight: Tensor, shape: list[int]) -> Int8Sums | None:
    """Return a function that computes the sums of a convolution or a linear layer, or None where torch has none.

    The codes of the weight, minus the zero point and on the CPU, are laid out for the shape of the input.
    """
    zero_padding = getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(
        getattr(layer, "padding", 0), str
    )
    if not layer.OP_KIND.is_plain_layer or not zero_padding or not _fits(weight) or not is_exact():
        return None
    geometry: tuple[Any, ...] = ([], [], [], 1)
    if layer.OP_KIND.convolves:
        geometry = (list(layer.stride), list(layer.padding), list(layer.dilation), int(layer.groups))
    packed = torch.classes.qtoolkit.Int8Layer(weight.to(torch.int8).contiguous(), *geometry, shape)

    def sums(codes: Tensor, zero_point: int) -> Tensor:
        y: Tensor = packed.sums(codes, zero_point)
        return y if layer.returns_channels_last else y.contiguous()  # torch returns images in channels_last

    return sums


def _fits(weight: Tensor) -> bool:
    return weight.is_cpu and float(weight.min()) >= -128 and float(weight.max()) <= 127
