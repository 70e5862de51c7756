"""torch's fused attention on the CPU, which in training keeps codes of query, key and value for backward.

The fused ops are private to torch, and nothing else in the package names them. Without them attention keeps floats.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.nn.product import Product
from qtoolkit.ops.layer import Codes
from qtoolkit.quantizers.codes import TensorCodes, known_of, values_of
from qtoolkit.quantizers.quantizer import Quantizer

_choice = getattr(torch, "_fused_sdp_choice", None)
_fused = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_fused_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
HAS_FUSED = None not in (_choice, _fused, _fused_backward)


def attention_of(how: Product) -> Callable[..., Tensor]:
    """Return the function that computes torch.nn.functional.scaled_dot_product_attention as `attention` does.

    It takes what is known of query, key and value before them.
    """

    def computed(
        known: Sequence[TensorCodes | None], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        return attention((query, key, value), how.sources, known, how.arithmetic, *args, **kwargs)

    return computed


def attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    sources: Iterable[Quantizer | None],
    known: Sequence[TensorCodes | None],
    arithmetic: TrainingArithmetic,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **no_others: Any,
) -> Tensor:
    """Return scaled dot-product attention, keeping codes of inputs on grids for backward where torch takes its fused op.

    Values and gradients are torch's, bit for bit.

    Args:
        inputs: Query, key and value.
        sources: For each of them the quantizer on whose grid its values lie, or None.
        known: What is known of each of them.
        arithmetic: What to keep.
        attn_mask: None.
        dropout_p: 0.
        is_causal: As in torch's function.
        scale: The same.
        no_others: The defaults of other arguments.
    """
    if arithmetic.save == "codes" and _fits(inputs, is_causal, scale):
        grids = [known_of(x, source, of_x) for x, source, of_x in zip(inputs, sources, known, strict=True)]
        kept = [None if grid is None else grid.of_whole(x) for x, grid in zip(inputs, grids, strict=True)]
        if kept != [None] * 3:
            y: Tensor = _Attention.apply(*inputs, is_causal, scale, kept)
            return y
    return F.scaled_dot_product_attention(*inputs, None, 0.0, is_causal, scale=scale)


def described(sources: Iterable[Quantizer | None], arithmetic: TrainingArithmetic) -> str:
    """Return what the attention keeps for backward, in words."""
    known = any(source is not None and source.capability.codes for source in sources)
    keeps = arithmetic.save == "codes" and HAS_FUSED and known
    return f"float, saves {'codes on a CPU' if keeps else 'floats'}"


def _fits(inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool, scale: float | None) -> bool:
    if (
        not HAS_FUSED
        or torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not all(map(is_ordinary, inputs))
    ):
        return False
    if not all(x.is_cpu and x.numel() for x in inputs) or not any(x.requires_grad for x in inputs):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return bool(_choice(*inputs, None, 0.0, is_causal, scale=scale) == SDPBackend.FLASH_ATTENTION.value)  # type: ignore[misc]


class _Attention(torch.autograd.Function):
    """The fused op of query, key and value. Each of them is kept as its codes, where it has them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Return the attention of query, key and value; then come is_causal, scale and the codes of each, or None."""
        *inputs, ctx.is_causal, ctx.scale, kept = args
        y, sums = _fused(*inputs, 0.0, ctx.is_causal, scale=ctx.scale)  # type: ignore[misc]
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        ctx.ranges = [None if codes is None else (codes.qmin, codes.qmax) for codes in kept]
        parts = [
            (x, None, None) if codes is None else (codes.codes, codes.scale, codes.zero_point)
            for x, codes in zip(inputs, kept, strict=True)
        ]
        ctx.save_for_backward(y, sums, *(part for each in parts for part in each))
        return y  # type: ignore[no-any-return]  # a Tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value, from the values that the codes stand for."""
        y, sums, *parts = ctx.saved_tensors
        inputs = [
            parts[3 * i] if ends is None else values_of(Codes(*parts[3 * i : 3 * i + 3], *ends), *like)
            for i, (ends, like) in enumerate(zip(ctx.ranges, ctx.like, strict=True))
        ]
        gradients = _fused_backward(grad, *inputs, y, sums, 0.0, ctx.is_causal, scale=ctx.scale)  # type: ignore[misc]
        return *gradients, None, None, None
