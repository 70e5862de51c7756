"""torch's fused attention on the CPU, which in training keeps query, key and value as integers for backward.

The fused ops are private to torch, and nothing else in the package asks for them; the library's op calls them. Without them
attention keeps floats.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from qtoolkit._native import library
from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.nn.product import Product, of_codes
from qtoolkit.quantizers.codes import TensorCodes, tensor_codes_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run

_choice = getattr(torch, "_fused_sdp_choice", None)
_fused = "_scaled_dot_product_flash_attention_for_cpu"
HAS_FUSED = _choice is not None and all(hasattr(torch.ops.aten, name) for name in (_fused, f"{_fused}_backward"))

_fused_attention = library.fused_attention.default


def attention_of(how: Product) -> Callable[..., Tensor]:
    """Return the function that computes torch.nn.functional.scaled_dot_product_attention as `attention` does.

    It takes the run, and the integers of query, key and value or None, before them.
    """

    def computed(
        run: Run,
        input_codes: Sequence[TensorCodes | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attention(run, (query, key, value), how.sources, input_codes, how.arithmetic, *args, **kwargs)

    return computed


def attention(
    run: Run,
    inputs: tuple[Tensor, Tensor, Tensor],
    sources: Iterable[Quantizer | None],
    input_codes: Sequence[TensorCodes | None],
    arithmetic: TrainingArithmetic,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **no_others: Any,
) -> Tensor:
    """Return scaled dot-product attention, keeping quantized inputs as integers for backward where torch takes its fused op.

    Values and gradients are torch's, bit for bit.

    Args:
        run: What runs the forward.
        inputs: Query, key and value.
        sources: The quantizer of each of them, or None.
        input_codes: The integers of each of them, or None.
        arithmetic: What to keep.
        attn_mask: None.
        dropout_p: 0.
        is_causal: As in torch's function.
        scale: The same.
        no_others: The defaults of other arguments.
    """
    if arithmetic.save == "codes" and _fits(run, inputs, is_causal, scale):
        grids = [tensor_codes_of(run, *each) for each in zip(inputs, sources, input_codes, strict=True)]
        kept = [None if grid is None else grid.of_whole(x) for x, grid in zip(inputs, grids, strict=True)]
        if kept != [None] * 3:
            operands = ((x, *of_codes(codes)) for x, codes in zip(inputs, kept, strict=True))
            is_signed = [codes is None or codes.qmin < 0 for codes in kept]
            y: Tensor = _fused_attention(*chain.from_iterable(operands), inputs[1].shape, is_signed, is_causal, scale)[
                0
            ]
            return y
    return F.scaled_dot_product_attention(*inputs, None, 0.0, is_causal, scale=scale)


def described(sources: Iterable[Quantizer | None], arithmetic: TrainingArithmetic) -> str:
    """Return which tensors the attention keeps for backward, in words."""
    has_codes = any(source is not None and source.capability.codes for source in sources)
    keeps = arithmetic.save == "codes" and HAS_FUSED and has_codes
    return f"float, saves {'integers on a CPU' if keeps else 'floats'}"


def _fits(run: Run, inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool, scale: float | None) -> bool:
    if not HAS_FUSED or run.compiled or not torch.is_grad_enabled() or not all(is_ordinary(run, x) for x in inputs):
        return False
    if not all(x.is_cpu and x.numel() for x in inputs) or not any(x.requires_grad for x in inputs):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return bool(_choice(*inputs, None, 0.0, is_causal, scale=scale) == SDPBackend.FLASH_ATTENTION.value)  # type: ignore[misc]
