"""torch's int8 convolutions and matrix products on the CPU, which its compiler uses for quantized models on x86.

They are private to torch. `int8_sums` returns None where they are missing, or where a trial shows that their sums are not
exact, as on processors without VNNI, whose int8 products saturate; sums are then computed in float32 and float64.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (unsigned codes, their code of zero) -> sums of products of codes minus the code of zero, rounded to float32
Int8Sums = Callable[[Tensor, int], Tensor]
NAMES = ("qconv_prepack", "qconv_pointwise", "qlinear_prepack", "qlinear_pointwise")
PLAIN: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")  # output scale and zero point, dtype, no op after it


def int8_sums(layer: Any, weight: Tensor, shape: list[int]) -> Int8Sums | None:
    """Return a function that computes the sums of a convolution or a linear layer, or None where torch has none.

    Args:
        layer: The layer, whose geometry counts.
        weight: The codes of its weight minus the code of zero, on the CPU.
        shape: The shape of the input, for which the weight is laid out.
    """
    zero_padding = getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(
        getattr(layer, "padding", 0), str
    )
    if layer.KIND not in ("conv", "linear") or not zero_padding or not _fits(weight) or not is_exact():
        return None
    codes = weight.to(torch.int8).contiguous()
    if layer.KIND == "linear":
        return _linear(codes, shape)
    return _conv(codes, shape, list(layer.stride), list(layer.padding), list(layer.dilation), int(layer.groups))


def _fits(weight: Tensor) -> bool:
    return weight.is_cpu and float(weight.min()) >= -128 and float(weight.max()) <= 127


def _conv(
    weight: Tensor, shape: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Int8Sums:
    geometry, scales, zeros = (stride, padding, dilation, groups), *_no_scales(weight.size(0))
    packed = torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, shape)

    def sums(codes: Tensor, zero_point: int) -> Tensor:
        y: Tensor = torch.ops.onednn.qconv_pointwise(
            codes, 1.0, zero_point, packed, scales, zeros, None, *geometry, *PLAIN
        )
        return y

    return sums


def _linear(weight: Tensor, shape: list[int]) -> Int8Sums:
    scales, zeros = _no_scales(weight.size(0))
    packed = torch.ops.onednn.qlinear_prepack(weight, shape)

    def sums(codes: Tensor, zero_point: int) -> Tensor:
        y: Tensor = torch.ops.onednn.qlinear_pointwise(codes, 1.0, zero_point, packed, scales, zeros, None, *PLAIN)
        return y

    return sums


def _no_scales(channels: int) -> tuple[Tensor, Tensor]:
    return torch.ones(channels), torch.zeros(channels, dtype=torch.int32)


@functools.cache
def is_exact() -> bool:
    """Return whether torch has the ops, and computes the largest sums of pairs of products exactly."""
    if not all(hasattr(torch.ops.onednn, name) for name in NAMES):
        return False
    codes = torch.tensor([255, 254, 253, 0] * 16, dtype=torch.uint8)
    weight = torch.tensor([127, 127, -128, -128] * 16, dtype=torch.int8)
    expected = float((codes.double() - 3) @ weight.double())
    try:
        of_conv = _conv(weight.view(1, -1, 1, 1), [1, 64, 1, 1], [1, 1], [0, 0], [1, 1], 1)(codes.view(1, -1, 1, 1), 3)
        of_linear = _linear(weight.view(1, -1), [1, 64])(codes.view(1, -1), 3)
    except (RuntimeError, TypeError, NotImplementedError):  # another version of the private ops
        return False
    return of_conv.item() == expected and of_linear.item() == expected
