"""Multi-head attention with quantized weights and quantized inputs of its matrix products."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.config import QuantSpec
from qtoolkit.nn.layer_call import Source
from qtoolkit.nn.layer_op import LayerOp
from qtoolkit.nn.module import QuantModule, activation_quantizer
from qtoolkit.nn.on_codes import TakesCodes
from qtoolkit.nn.output_grid import quantized_for
from qtoolkit.nn.projection import OUT, UPDATED, Projection
from qtoolkit.nn.quantized_attention import Attends, as_summand
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run, running

IN_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
InputCodes = tuple[TensorCodes | None, TensorCodes | None, TensorCodes | None]
"""The integers of query, key and value, where they have some."""
Input = tuple[Tensor, TensorCodes | None]
"""One of them, and its integers, if it has some."""
SHARED = {
    (True, True): ("qkv",),
    (True, False): ("qk", "v"),
    (False, True): ("q", "kv"),
    (False, False): ("q", "k", "v"),
}
"""The projections where query and key, and key and value, are one tensor or not."""
ACTIVATION_QUANTIZERS = (
    "query_quantizer",
    "key_quantizer",
    "value_quantizer",
    "softmax_quantizer",
    "out_proj_input_quantizer",
)


def stop_fast_path(module: nn.Module, args: Any) -> None:
    """Do nothing. Any hook keeps TransformerEncoderLayer from calling its fused float kernel, which skips the quantizers."""


class Parts:
    """The quantizers and projections inside of an attention, each asked at every call how it computes.

    Args:
        attention: The attention.
    """

    def __init__(self, attention: "QuantMultiheadAttention") -> None:
        self.attention = attention

    def quantized(self, run: Run, name: str, x: Tensor) -> tuple[Tensor, TensorCodes | None]:
        """Return x quantized by the quantizer of this name, or x itself without one, and its integers, if it has some."""
        return quantized_for(run, self.attention.training_arithmetic, getattr(self.attention, name), x)

    def of_heads(self, run: Run, name: str, x: Tensor, factor: float) -> tuple[Tensor, TensorCodes | None]:
        """Return a view of heads times a factor, contiguous, quantized by the quantizer of this name."""
        return self.quantized(run, name, heads(x, factor))

    def projected(self, run: Run, projection: Projection, x: Tensor, input_codes: TensorCodes | None) -> Tensor:
        """Return a projection of x, which has these integers."""
        return projection(run, x, input_codes)


class QuantMultiheadAttention(QuantModule, nn.MultiheadAttention, TakesCodes, Attends):
    """torch.nn.MultiheadAttention with quantized projections and matrix products.

    It quantizes the weights of the projections and the inputs of each matrix product: scaled query and key, softmax output
    and value, and the input of the output projection. The module's own inputs are quantized by the graph pass, or by
    `input_quantizer`, one for query, key and value. Masks, biases and softmax stay float. Both `need_weights` modes
    compute the same ops; no fused float kernel is used. If the masks leave a query no key, its output before the output
    projection is 0, as in torch's module without weights, which returns NaN with them.

    Args:
        *args: Arguments of torch.nn.MultiheadAttention.
        weight_spec: Spec of the weights, or None; axis 0 is the output feature.
        activation_spec: Spec of the inputs of the matrix products inside, or None.
        **kwargs: Keyword arguments of torch.nn.MultiheadAttention.

    Attributes:
        sources: The sources of query, key and value in training, one object for inputs that are one tensor.

    Example:
        >>> layer = QuantMultiheadAttention(8, 2, batch_first=True, weight_spec=qt.QuantSpec(axis=0))
        >>> y, weights = layer(*[torch.zeros(1, 3, 8)] * 3)
        >>> y.shape, weights.shape
        (torch.Size([1, 3, 8]), torch.Size([1, 3, 3]))
    """

    FLOAT = nn.MultiheadAttention
    KIND = "attention"
    UPDATED = UPDATED

    out_proj_input_quantizer: Quantizer | None
    in_proj_weight_quantizer: Quantizer | None
    out_proj_weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    sources: Sequence[Source | None] = (None, None, None)

    def __init__(
        self,
        *args: Any,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.add_quantizers(weight_spec, type(self).__name__, activation_spec)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Add the quantizers; the weights' take the weights' ranges."""
        self.input_quantizer = None
        for attribute in ACTIVATION_QUANTIZERS:
            setattr(self, attribute, activation_quantizer(activation, f"{name}.{attribute}", self))
        self.add_weight_quantizers(weight, name)
        self.add_updated_channels()
        self._hook = self.register_forward_pre_hook(stop_fast_path).id

    def to_float(self) -> nn.Module:
        """Return the float module with the same parameters."""
        layer = super().to_float()
        layer._forward_pre_hooks.pop(self._hook)
        return layer

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of the attributes that the float module does not have."""
        own = ("input_quantizer", "_hook", "training_arithmetic", "sources")
        return (*own, *ACTIVATION_QUANTIZERS, *self.weights_to_quantize(), *UPDATED)

    @property
    def dropout_p(self) -> float:  # type: ignore[override]  # torch's own name for it is `dropout`
        """The dropout probability of the attention weights in training mode."""
        return float(self.dropout)

    def weights_to_quantize(self) -> Mapping[str, Tensor]:
        """Return each weight by the name of its quantizer attribute."""
        weights = {f"{name}_quantizer": getattr(self, name) for name in IN_WEIGHTS if getattr(self, name) is not None}
        return {**weights, "out_proj_weight_quantizer": self.out_proj.weight}

    def layers_of_weights(self) -> Mapping[str, LayerOp]:
        return {**self._whole_in_projections(), "out_proj.weight": self.out_projection}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        input_codes: InputCodes = (None, None, None),
        parts: Parts | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are torch.nn.MultiheadAttention's.

        `input_codes` are the integers of query, key and value, and `parts` computes inside it: the forward of a prepared
        model passes both.

        Raises:
            ValueError: An input is a nested tensor, or the numbers of dimensions do not fit.
        """
        run = running()
        self._check(query, key, value, attn_mask, is_causal)
        batched = query.dim() == 3
        inputs = self._quantize_inputs(run, (query, key, value), batched, input_codes)
        parts = Parts(self) if parts is None else parts
        q, k, v = self._project(run, inputs, parts)
        along = 1 if self.batch_first and batched else 0
        k, v, added = self._extend(k, v, along)
        target, source, batch = q.size(along), k.size(along), q.size(1 - along)
        if is_causal and key_padding_mask is None and not need_weights:
            # torch then ignores the mask and applies a causal one, which also masks what bias_k and add_zero_attn append.
            attn_mask, added = torch.ones(target, source, dtype=torch.bool, device=q.device).triu(1), 0
        mask = self._merge_masks(attn_mask, key_padding_mask, q.dtype, batch, added)
        of_heads = (
            ("query_quantizer", self._heads(q, along), math.sqrt(1.0 / self.head_dim)),
            ("key_quantizer", self._heads(k, along), 1.0),
            ("value_quantizer", self._heads(v, along), 1.0),
        )
        operands, codes = zip(*(parts.of_heads(run, *each) for each in of_heads), strict=True)
        y, weights = self._attend(run, operands, codes, mask, in_one_op=not need_weights)
        weights = weights if need_weights else None
        y, codes_of_y = parts.quantized(run, "out_proj_input_quantizer", self._joined(y, along))
        y = parts.projected(run, self.out_projection, y, codes_of_y)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return (y, weights) if batched else (y.squeeze(1), None if weights is None else weights.squeeze(0))

    def forward_fp32(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the module in float, as torch.nn.MultiheadAttention does."""
        return super().forward(*args, **kwargs)

    # ---- parts

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "QuantMultiheadAttention: query, key and value must not be nested tensors; build the TransformerEncoder "
                "with enable_nested_tensor=False."
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                f"QuantMultiheadAttention: query, key and value must all have 2 or all have 3 dimensions, got "
                f"{query.dim()}, {key.dim()} and {value.dim()}."
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                "QuantMultiheadAttention: is_causal=True is a hint about attn_mask; pass the mask as well."
            )

    def _quantize_inputs(
        self, run: Run, inputs: tuple[Tensor, Tensor, Tensor], batched: bool, input_codes: InputCodes
    ) -> list[Input]:
        """Quantize each distinct tensor once, and give one without a batch a batch of 1, after its length."""
        # Compared as objects, as torch does it: equal values in two tensors may have two sources, and need two gradients.
        query, key, value = inputs
        q = self._quantize_input(run, query, batched, input_codes[0])
        k = q if key is query else self._quantize_input(run, key, batched, input_codes[1])
        v = k if value is key else q if value is query else self._quantize_input(run, value, batched, input_codes[2])
        return [q, k, v]

    def _quantize_input(self, run: Run, x: Tensor, batched: bool, input_codes: TensorCodes | None) -> Input:
        if self.input_quantizer is not None:
            x, input_codes = quantized_for(run, self.training_arithmetic, self.input_quantizer, x)
        return (x, input_codes) if batched else (x.unsqueeze(1), None)

    def input_sources(self) -> Sequence[Source | None]:
        return self.sources

    def unlink(self) -> None:
        self.sources = (None, None, None)

    def source_of(self, place: int) -> Quantizer | None:
        """Return the quantizer on whose grid query, key or value lies, by its place; None where that is not known."""
        if self.input_quantizer is not None:
            return self.input_quantizer
        source = self.sources[place]
        changes_input = any(hook is not stop_fast_path for hook in self._forward_pre_hooks.values())
        return None if source is None or changes_input else source.now()

    def computes_by(self) -> list[nn.Module]:
        """Return the modules beside it on which it depends how it computes in training."""
        quantizers = (self.input_quantizer, self.out_proj_input_quantizer, *self.weight_quantizers().values())
        inside = [module for quantizer in quantizers if quantizer is not None for module in quantizer.modules()]
        return [self.out_proj, *inside, *super().computes_by()]

    def in_projections(self, inputs: Sequence[object]) -> list[Projection]:
        """Return the projections of query, key and value: one of neighbours that are one object, if their weights are one."""
        first, *others = self._whole_in_projections().values()
        if others:
            return [first, *others]
        query, key, value = inputs
        return first.split(SHARED[query is key, key is value])

    def _whole_in_projections(self) -> dict[str, Projection]:
        """Return the projection by each weight of the inputs."""
        if self.in_proj_weight is not None:
            return {"in_proj_weight": self._projection("qkv", "in_proj_weight", self.in_proj_bias, 0)}
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        names = [f"{name}_proj_weight" for name in "qkv"]
        own = enumerate(zip("qkv", names, biases, strict=True))
        return {weight: self._projection(name, weight, bias, place) for place, (name, weight, bias) in own}

    def _projection(self, name: str, weight: str, bias: Tensor | None, place: int) -> Projection:
        source, quantizer = self.source_of(place), getattr(self, f"{weight}_quantizer")
        return Projection(self, name, getattr(self, weight), quantizer, bias, source)

    @property
    def out_projection(self) -> Projection:
        """The projection of the output."""
        weight, bias = self.out_proj.weight, self.out_proj.bias
        return Projection(self, OUT, weight, self.out_proj_weight_quantizer, bias, self.out_proj_input_quantizer)

    @property
    def projections(self) -> list[Projection]:
        """All projections, for reports: of as many tensors as a graph calls it with, or of one."""
        return [*self.in_projections(self.sources), self.out_projection]

    def _project(self, run: Run, inputs: list[Input], by: Parts) -> list[Tensor]:
        """Return the projected query, key and value; `inputs` are their values, each with its integers."""
        found: list[Tensor] = []
        for projection in self.in_projections([x for x, _ in inputs]):
            x, input_codes = inputs[len(found)]
            y, count = by.projected(run, projection, x, input_codes), len(projection.name)
            found += [y] if count == 1 else y.chunk(count, dim=-1)
        return found

    def _extend(self, k: Tensor, v: Tensor, along: int) -> tuple[Tensor, Tensor, int]:
        """Append bias_k and bias_v, and the zeros of add_zero_attn, to keys and values along a dimension; return how many."""
        before, batch = k.size(along), k.size(1 - along)
        copies = (batch, 1, 1) if along else (1, batch, 1)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.repeat(copies)], along)
            v = torch.cat([v, self.bias_v.repeat(copies)], along)
        if self.add_zero_attn:
            row = (0, 0, 0, 1) if along else (0, 0, 0, 0, 0, 1)
            k, v = F.pad(k, row), F.pad(v, row)
        return k, v, k.size(along) - before

    def _merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype, batch: int, added: int
    ) -> Tensor | None:
        """Return the sum of both masks as floats, broadcastable to (batch, heads, target, source), or None."""
        masks = []
        if attn_mask is not None:
            per_head = attn_mask if attn_mask.dim() == 2 else self._split_heads(attn_mask, batch)
            masks.append(_as_float(per_head, dtype))
        if key_padding_mask is not None:
            masks.append(_as_float(key_padding_mask, dtype).reshape(batch, 1, 1, -1))
        return F.pad(sum(masks[1:], masks[0]), (0, added)) if masks else None

    def _heads(self, x: Tensor, along: int) -> Tensor:
        """(length, batch, features), or the batch first -> a view (batch, heads, length, features of a head)."""
        parts = x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        return parts.transpose(1, 2) if along else parts.permute(1, 2, 0, 3)

    def _split_heads(self, x: Tensor, batch: int) -> Tensor:
        """(batch * heads, ...) -> (batch, heads, ...)."""
        return x.reshape(batch, self.num_heads, *x.shape[1:])

    def _joined(self, y: Tensor, along: int) -> Tensor:
        """(batch, heads, length, features of a head) -> (length, batch, features), or the batch first."""
        return (y.transpose(1, 2) if along else y.permute(2, 0, 1, 3)).flatten(2)


def heads(x: Tensor, factor: float) -> Tensor:
    """Return a view of heads times a factor, contiguous.

    As the gradient of a product is: the backward of a quantizer is slow where memory orders differ.
    """
    return x.contiguous() if factor == 1.0 else x.contiguous() * factor


def _as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return as_summand(mask, dtype) if mask.dtype == torch.bool else mask.to(dtype)
