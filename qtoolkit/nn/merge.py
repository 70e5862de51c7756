"""Ops of several tensors as modules, float and quantized: for models whose + and torch.cat no graph pass sees."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.config import QuantSpec
from qtoolkit.names import check_known
from qtoolkit.nn.inputs import QuantInput, inner_quantizer, is_active
from qtoolkit.nn.module import Quantizer, QuantModule, quantized

OPERANDS = ("both", "first", "second")


class Merge(nn.Module):
    """An op of two tensors as a module, which module replacement can quantize; in a graph it is traced into the op.

    Args:
        quantized: Which operands are quantized once the module is: "both", "first" or "second". On TensorRT, the sum of a
            residual block fuses into the convolution before it where only the other branch is quantized.

    Raises:
        ValueError: `quantized` is none of the three.
    """

    def __init__(self, quantized: str = "both") -> None:
        super().__init__()
        check_known("value of `quantized`", quantized, OPERANDS)
        self.quantized = quantized

    def extra_repr(self) -> str:
        """Return which operands are quantized."""
        return f"quantized={self.quantized!r}"


class Add(Merge):
    """The sum of two tensors.

    Example:
        >>> Add()(torch.tensor(1.0), torch.tensor(2.0))
        tensor(3.)
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return input + other."""
        return input + other


class Mul(Merge):
    """The product of two tensors, element by element.

    Example:
        >>> Mul()(torch.tensor(3.0), torch.tensor(2.0))
        tensor(6.)
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return input * other."""
        return input * other


class MatMul(Merge):
    """The matrix product of two tensors, as torch.matmul defines it.

    Example:
        >>> MatMul()(torch.ones(2, 3), torch.ones(3))
        tensor([3., 3.])
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return torch.matmul(input, other)."""
        return torch.matmul(input, other)


class Cat(nn.Module):
    """The concatenation of tensors.

    Args:
        dim: Dimension along which they are joined.

    Example:
        >>> Cat(dim=1)([torch.ones(2, 3), torch.ones(2, 1)]).shape
        torch.Size([2, 4])
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return torch.cat(tensors, dim)."""
        return torch.cat(list(tensors), self.dim)

    def extra_repr(self) -> str:
        """Return the dimension."""
        return f"dim={self.dim}"


class ScaledDotProductAttention(nn.Module):
    """torch.nn.functional.scaled_dot_product_attention as a module.

    Args:
        dropout_p: Share of the attention weights that are dropped, in training mode alone. With any, `qtoolkit.prepare` keeps
            the module whole, in float; module replacement quantizes it.
        is_causal: Mask out what comes later, by the lower triangle of (target, source) from the top left.
        scale: Factor of the scores; None is 1 / sqrt(features of the query).
        enable_gqa: Let several query heads share a head of key and value.

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
            attn_mask: To broadcast over (..., heads, target, source): booleans, True where it may look, or floats to add.

        Returns:
            (..., heads, target, features of the value).
        """
        # Without dropout nothing is decided on the mode, so that the op is traced into.
        dropout = self.dropout_p if self.dropout_p and self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    def extra_repr(self) -> str:
        """Return the options."""
        names = ("dropout_p", "is_causal", "scale", "enable_gqa")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class QuantMerge(QuantModule):
    """An op of two tensors with a quantizer for each that `quantized` names; mixed into the float module.

    Args:
        quantized: Which operands are quantized.
        input_spec: Spec of the operands, or None.

    Attributes:
        input_quantizer: Quantizer of the first operand, or None. With quantized="second" there is no such attribute.
        other_quantizer: Quantizer of the second, or None.
    """

    quantized: str
    other_quantizer: Quantizer | None

    def __init__(self, quantized: str = "both", input_spec: QuantSpec | None = None) -> None:
        super().__init__(quantized)
        name = type(self).__name__
        self.add_quantizers(None, name, input_spec)
        if quantized != "second":
            self.input_quantizer = inner_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Put the second operand's quantizer in, and make the place for the first one's."""
        if self.quantized != "second":
            self.input_quantizer = None
        spec = None if self.quantized == "first" else activation
        self.other_quantizer = inner_quantizer(spec, f"{name}.other_quantizer", self)

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float module."""
        return ("input_quantizer", "other_quantizer")

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return nothing: there is no weight."""
        return {}

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Compute the op of its quantized operands.

        Raises:
            TypeError: An operand is no tensor.
        """
        for name, operand in (("input", input), ("other", other)):
            if not isinstance(operand, Tensor):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be a tensor, which has a range to quantize, got a "
                    f"{type(operand).__name__}; compute with numbers outside the module."
                )
        first: Quantizer | None = getattr(self, "input_quantizer", None)
        return super().forward(quantized(first, input), quantized(self.other_quantizer, other))  # type: ignore[no-any-return]

    def forward_fp32(self, input: Tensor, other: Tensor) -> Tensor:
        """Compute the op in float."""
        return super().forward(input, other)  # type: ignore[no-any-return]  # a Tensor


class QuantAdd(QuantMerge, Add):
    """The sum of two quantized tensors.

    Example:
        >>> layer = QuantAdd(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax, layer.other_quantizer.amax = 7.0, 14.0
        >>> layer(torch.tensor(1.4), torch.tensor(3.1))
        tensor(5.)
    """

    FLOAT = Add
    KIND = "add"


class QuantMul(QuantMerge, Mul):
    """The product of two quantized tensors, element by element."""

    FLOAT = Mul
    KIND = "mul"


class QuantMatMul(QuantMerge, MatMul):
    """The matrix product of two quantized tensors."""

    FLOAT = MatMul
    KIND = "matmul"


class QuantCat(QuantInput, Cat):
    """The concatenation of tensors that one quantizer has put on the same grid, so that it moves codes alone.

    Example:
        >>> layer = QuantCat(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax = 7.0
        >>> layer([torch.tensor([1.4]), torch.tensor([50.0])])
        tensor([1., 7.])
    """

    FLOAT = Cat
    KIND = "cat"

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:  # type: ignore[override]  # several inputs, as Cat takes them
        """Join the quantized tensors."""
        return self.forward_fp32([quantized(self.input_quantizer, x) for x in tensors])  # type: ignore[no-any-return]


INNER = ("query_quantizer", "key_quantizer", "value_quantizer", "softmax_quantizer")


class QuantScaledDotProductAttention(QuantModule, ScaledDotProductAttention):
    """Attention with quantized inputs of both matrix products: the scaled query, key, attention weights and value.

    Masks and the softmax stay float. Where no quantizer is on, it is torch's own function.

    Args:
        *args: As `ScaledDotProductAttention` takes them.
        activation_spec: Spec of what is quantized, or None.
        **kwargs: As `ScaledDotProductAttention` takes them.

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

    query_quantizer: Quantizer | None
    key_quantizer: Quantizer | None
    value_quantizer: Quantizer | None
    softmax_quantizer: Quantizer | None

    def __init__(self, *args: Any, activation_spec: QuantSpec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_quantizers(None, type(self).__name__, activation_spec)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Put the quantizers in."""
        for inner in INNER:
            setattr(self, inner, inner_quantizer(activation, f"{name}.{inner}", self))

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float module."""
        return INNER

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return nothing: there is no weight."""
        return {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend; arguments and result as of `ScaledDotProductAttention`.

        Raises:
            ValueError: There is a mask besides is_causal.
        """
        if self.is_causal and attn_mask is not None:
            raise ValueError(
                "QuantScaledDotProductAttention: attn_mask must be None with is_causal=True, which is a mask itself; put "
                "both into one attn_mask."
            )
        if not any(is_active(getattr(self, inner)) for inner in INNER):
            return self.forward_fp32(query, key, value, attn_mask)
        scale = query.size(-1) ** -0.5 if self.scale is None else self.scale
        q = quantized(self.query_quantizer, query * scale)
        k = self._for_heads_of(query, quantized(self.key_quantizer, key))
        v = self._for_heads_of(query, quantized(self.value_quantizer, value))
        weights = self._weights(torch.matmul(q, k.transpose(-2, -1)), attn_mask)
        dropped = F.dropout(quantized(self.softmax_quantizer, weights), self.dropout_p, self.training)
        return torch.matmul(dropped, v)

    def forward_fp32(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the module in float, by torch's own function."""
        return super().forward(*args, **kwargs)

    def _for_heads_of(self, query: Tensor, x: Tensor) -> Tensor:
        return x.repeat_interleave(query.size(-3) // x.size(-3), -3) if self.enable_gqa else x

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the softmax of masked scores; zeros where a row has nothing to look at, as torch's function gives."""
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            return scores.softmax(-1)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
