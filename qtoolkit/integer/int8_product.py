"""Sums of codes on a GPU as products of int8 matrices, for layers of converted models. csrc/layer/code_sums.h has them."""

from collections.abc import Callable

import torch
from torch import Tensor

from qtoolkit.config import QuantSpec
from qtoolkit.ops.layer import Geometry
from qtoolkit.ops.sums import Bounds, has_int8_product
from qtoolkit.quantizers.frozen import code_dtype

CodeSums = Callable[[Tensor, Tensor | None], Tensor]  # (codes, their zero point) -> sums, float32 or float64
MOST_WEIGHTS = (2**31 - 1) // 128  # the largest sum of an output's magnitudes with which all sums fit in int32


def computes_on(device: torch.device) -> bool:
    """Return whether layers on a device compute so: on a GPU, where torch has the product."""
    return device.type == "cuda" and has_int8_product(device)


def code_sums(
    source: QuantSpec, weight: QuantSpec, geometry: Geometry | None, bounds: Bounds, codes: Tensor
) -> CodeSums | None:
    """Return a function that computes the sums of a layer, or None where they are no product of two int8 matrices.

    They are float32 where that holds them by `bounds`, else float64. `geometry` is None where only torch's own op computes it.
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
