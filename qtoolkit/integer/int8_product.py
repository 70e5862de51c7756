"""Integer sums with torch's int8 products, for layers of converted models: oneDNN on the CPU, matrix products on a GPU.

See csrc/layer/onednn.h and csrc/layer/code_sums.h.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.ops.layer import Geometry
from qtoolkit.ops.sums import Bounds, has_int8_product, is_exact
from qtoolkit.quantizers.frozen import code_dtype

# (unsigned integers, their zero point) -> sums of products of integers minus the zero point, rounded to float32
Int8Sums = Callable[[Tensor, int], Tensor]
CodeSums = Callable[[Tensor, Tensor | None], Tensor]  # (codes, their zero point) -> sums, float32 or float64
MOST_WEIGHTS = (2**31 - 1) // 128  # the largest sum of an output's magnitudes with which all sums fit in int32


def int8_sums(layer: Any, weight: Tensor, shape: list[int]) -> Int8Sums | None:
    """Return a function that computes the sums of a convolution or a linear layer; None if torch has none.

    Also None if a trial shows that torch's sums are not exact, as on processors without VNNI, where int8 products saturate;
    sums are then computed in float32 and float64. The integer weight, minus the zero point and on the CPU, is packed for the
    shape of the input.
    """
    by_numbers = not isinstance(getattr(layer, "padding", 0), str)
    zero_padding = by_numbers and getattr(layer, "padding_mode", "zeros") == "zeros"
    if not layer.OP_KIND.is_plain_layer or not zero_padding or not _fits(weight) or not is_exact():
        return None
    geometry: tuple[object, ...] = ([], [], [], 1)
    if layer.OP_KIND.convolves:
        geometry = (list(layer.stride), list(layer.padding), list(layer.dilation), int(layer.groups))
    packed = torch.classes.qtoolkit.Int8Layer(weight.to(torch.int8).contiguous(), *geometry, shape)

    def sums(codes: Tensor, zero_point: int) -> Tensor:
        y: Tensor = packed.sums(codes, zero_point)
        return y if layer.returns_channels_last else y.contiguous()  # torch returns images in channels_last

    return sums


def _fits(weight: Tensor) -> bool:
    return weight.is_cpu and float(weight.min()) >= -128 and float(weight.max()) <= 127


def computes_on(device: torch.device) -> bool:
    """Return whether layers on a device compute with `code_sums`: on a GPU, if torch has the product."""
    return device.type == "cuda" and has_int8_product(device)


def code_sums(
    source: QuantSpec, weight: QuantSpec, geometry: Geometry | None, bounds: Bounds, codes: Tensor
) -> CodeSums | None:
    """Return a function that computes the sums of a layer; None if they are not a product of two int8 matrices.

    They are float32 if `bounds` fit into it, else float64. `geometry` is None if only torch's own op computes the layer.
    """
    in_bytes = code_dtype(source.qmin, source.qmax).itemsize == 1 and code_dtype(weight.qmin, weight.qmax) == torch.int8
    of_codes = torch.classes.qtoolkit.CodeSums
    if geometry is None or not in_bytes or bounds.weights > MOST_WEIGHTS:
        return None
    if not of_codes.take(codes, geometry.transposed, geometry.groups):
        return None
    dtype = torch.float32 if bounds.exact_in_float32 else torch.float64
    layer = of_codes(codes.to(torch.int8), *map(list, (geometry.stride, geometry.padding, geometry.dilation)))

    def sums(codes: Tensor, zero_point: Tensor | None) -> Tensor:
        y: Tensor = layer.sums(codes, zero_point, dtype)
        return y

    return sums
