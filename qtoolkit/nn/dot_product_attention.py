"""Scaled dot-product attention as a module, float and quantized, for models that are not traced."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.config import QuantSpec
from qtoolkit.nn.module import QuantModule, activation_quantizer, is_active
from qtoolkit.nn.output_grid import quantized_for
from qtoolkit.nn.quantized_attention import Attends, as_summand
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.running import running

QUANTIZERS = ("query_quantizer", "key_quantizer", "value_quantizer", "softmax_quantizer")


class ScaledDotProductAttention(nn.Module):
    """torch.nn.functional.scaled_dot_product_attention as a module.

    Args:
        dropout_p: Dropout probability of the attention weights in training mode. If it is not 0, `qtoolkit.prepare` leaves
            the module in float, as a leaf module; module replacement quantizes it.
        is_causal: Apply the causal mask, the lower triangle of (target, source).
        scale: Factor of the scores; None is 1 / sqrt(features of the query).
        enable_gqa: Grouped-query attention: several query heads share a head of key and value.

    Example:
        >>> ScaledDotProductAttention(is_causal=True)(*[torch.zeros(1, 2, 5, 8)] * 3).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        super().__init__()
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = dropout_p, is_causal, scale, enable_gqa

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            query: (..., heads, target, features).
            key: (..., heads, source, features).
            value: (..., heads, source, features of the value).
            attn_mask: Broadcastable to (..., heads, target, source): booleans, True to take part, or floats to add.

        Returns:
            (..., heads, target, features of the value).
        """
        # Without dropout, no branch depends on the training mode, so the op can be traced.
        dropout = self.dropout_p if self.dropout_p and self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    def extra_repr(self) -> str:
        names = ("dropout_p", "is_causal", "scale", "enable_gqa")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class QuantScaledDotProductAttention(QuantModule, ScaledDotProductAttention, Attends):
    """Attention with quantized inputs of both matrix products: the scaled query, key, attention weights and value.

    Masks and the softmax stay float. With all quantizers off it calls torch's own function.

    Args:
        *args: Arguments of `ScaledDotProductAttention`.
        activation_spec: Spec of the inputs of the matrix products, or None.
        **kwargs: Keyword arguments of `ScaledDotProductAttention`.

    Attributes:
        query_quantizer: Quantizer of the query times the scale, or None.
        key_quantizer: Quantizer of the key, or None.
        value_quantizer: Quantizer of the value, or None.
        softmax_quantizer: Quantizer of the attention weights, or None.

    Example:
        >>> layer = QuantScaledDotProductAttention(activation_spec=qt.QuantSpec())
        >>> with qt.calibrating(layer):
        ...     layer(*[torch.ones(1, 2, 5, 8)] * 3).shape
        torch.Size([1, 2, 5, 8])
        >>> layer.softmax_quantizer.observer.hi
        tensor(0.2000)
    """

    FLOAT = ScaledDotProductAttention
    KIND = "attention"

    def __init__(self, *args: Any, activation_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_quantizers(None, type(self).__name__, activation_spec)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        for quantizer in QUANTIZERS:
            setattr(self, quantizer, activation_quantizer(activation, f"{name}.{quantizer}", self))

    def own_attributes(self) -> tuple[str, ...]:
        return (*QUANTIZERS, "training_arithmetic")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend; arguments and result are `ScaledDotProductAttention`'s.

        Raises:
            ValueError: Both a mask and is_causal=True are given.
        """
        if self.is_causal and attn_mask is not None:
            raise ValueError(
                "QuantScaledDotProductAttention: attn_mask must be None with is_causal=True, which is a mask itself; "
                "combine both into one attn_mask."
            )
        if not any(is_active(getattr(self, name)) for name in QUANTIZERS):
            return self.forward_fp32(query, key, value, attn_mask)  # type: ignore[no-any-return]  # a Tensor
        scale = query.size(-1) ** -0.5 if self.scale is None else self.scale
        run = running()
        q, of_q = quantized_for(run, self.training_arithmetic, self.query_quantizer, query * scale)
        k, of_k = self._heads_of(query, *quantized_for(run, self.training_arithmetic, self.key_quantizer, key))
        v, of_v = self._heads_of(query, *quantized_for(run, self.training_arithmetic, self.value_quantizer, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = as_summand(~attn_mask, query.dtype)
        y, _ = self._attend(run, (q, k, v), (of_q, of_k, of_v), attn_mask, causal=self.is_causal, in_one_op=True)
        return y

    def _heads_of(self, query: Tensor, x: Tensor, input_codes: TensorCodes | None) -> tuple[Tensor, TensorCodes | None]:
        """Repeat the heads of a key or a value for the heads of a query that share them."""
        if not self.enable_gqa:
            return x, input_codes
        return x.repeat_interleave(query.size(-3) // x.size(-3), -3), None
