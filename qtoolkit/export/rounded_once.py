"""A model in 16 bits on the CPU, as onnxruntime computes it: products in float32, each rounded once."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from qtoolkit.op_kinds.table import names_where

HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = names_where(lambda kind: kind.weight_argument)
NO_KERNEL = "not implemented for"  # in torch's errors


class RoundedOnce(TorchFunctionMode):
    """Computes products of 16-bit floats on the CPU in float32, and rounds each once.

    The output of a quantizer enters a product before it is rounded to 16 bits: onnxruntime joins DequantizeLinear and the Cast
    to float32 before a product, and kernels for int8 multiply the integers. Ops without a kernel for 16 bits are computed in
    float32, too. Without instructions for 16-bit floats, PyTorch's products take 6 to 25 times as long as in float32.
    """

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch."""
        given = (args, dict(kwargs or {}))
        floats = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
        quantizes = function is torch.ops.qtoolkit.fake_quant.default
        # Torch refuses products of tensors of other types beside each other; scales are float32.
        if not floats or not all(map(_is_half, floats[:1] if quantizes else floats)):
            return function(*args, **given[1])
        if not quantizes and getattr(function, "__name__", "") not in PRODUCTS:
            try:
                return function(*args, **given[1])
            except RuntimeError as error:
                if NO_KERNEL not in str(error):
                    raise
        args, named = tree_map(lambda x: _unrounded(x) if isinstance(x, Tensor) and _is_half(x) else x, given)
        cast, dtype = rounded if quantizes else Tensor.to, floats[0].dtype
        result = function(*args, **named)
        return tree_map(lambda y: cast(y, dtype) if isinstance(y, Tensor) and y.dtype == torch.float32 else y, result)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 values of a quantizer in another type; products take them as they were (`RoundedOnce`)."""
    result = values.to(dtype)
    if dtype in HALVES:
        result.unrounded = values  # type: ignore[attr-defined]
    return result


def _is_half(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in HALVES


def _unrounded(x: Tensor) -> Tensor:
    """Return a tensor in float32: as it was before it was rounded, unless it has been changed since."""
    values: Tensor | None = getattr(x, "unrounded", None)
    return values if values is not None and torch.equal(values.to(x.dtype), x) else x.float()
