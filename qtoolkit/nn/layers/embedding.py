"""Embeddings and embedding bags with a quantized table: one scale per row (axis 0), or one for the table."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.in_ops import quantize_rows
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def renormalize_table(module: nn.Module) -> None:
    """Renormalize all rows of an embedding with `max_norm`, float or quantized, and set `max_norm` to None.

    Lookups then return the same values, and change nothing: for a table that is not trained any more.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        _renormalize(module, _all_rows(module))
        module.max_norm = None


def _all_rows(module: "Table") -> Tensor:
    return torch.arange(module.num_embeddings, device=module.weight.device)


def _renormalize(module: "Table", rows: Tensor, table: Tensor | None = None) -> None:
    """Renormalize rows of the table in place, or of a copy of it."""
    if module.max_norm is not None:
        with torch.no_grad():  # F.embedding renormalizes the rows in place
            table = module.weight if table is None else table
            F.embedding(rows, table, None, module.max_norm, module.norm_type)


class _QuantTable(QuantWeighted):
    """The base class of embeddings and embedding bags, which renormalize rows in place before they look them up."""

    num_embeddings: int
    weight: Tensor
    max_norm: float | None
    norm_type: float

    bias = None

    def effective_weight(self) -> Tensor:
        """Return the table that lookups see: with all rows renormalized, as lookups renormalize theirs."""
        if self.max_norm is None:
            return super().effective_weight()
        table = self.weight.detach().clone()
        _renormalize(self, _all_rows(self), table)
        return table

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _renormalize(self, input)
        return super().forward(input, *args, **kwargs)

    def forward_fp32(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _renormalize(self, input)
        return super().forward_fp32(input, *args, **kwargs)


Table = nn.Embedding | nn.EmbeddingBag | _QuantTable


class QuantEmbedding(_QuantTable, nn.Embedding):
    """torch.nn.Embedding with a quantized table; `weight_spec`'s axis 0 is the row.

    With `sparse=True` the gradient of the table is sparse, as in torch's layer, and only the indexed rows are quantized.
    With `max_norm` the indexed rows are first renormalized in place, as in torch's layer; `qtoolkit.convert` renormalizes all
    rows once.

    Example:
        >>> layer = QuantEmbedding(10, 4, padding_idx=0, weight_spec=qt.QuantSpec(axis=0))
        >>> layer(torch.tensor([[1, 0, 9]])).shape
        torch.Size([1, 3, 4])
    """

    FLOAT = nn.Embedding
    KIND = "embedding"

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        return F.embedding(x, weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> Tensor:
        quantizer = self.weight_quantizer
        if self.sparse and self.training and isinstance(quantizer, TensorQuantizer):
            _renormalize(self, input)
            index, table = input.flatten(), self.weight
            rows = quantize_rows(quantizer, self.compute(index, table, None), index, table)
            return rows.reshape(*input.shape, self.embedding_dim)
        return super().forward(input)


class QuantEmbeddingBag(_QuantTable, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag with a quantized table; `weight_spec`'s axis 0 is the row. Sums and means are float.

    With `sparse=True` and a quantized table the gradient is dense: each step quantizes the whole table. `per_sample_weights`
    stay float. With `max_norm` the indexed rows are first renormalized in place, as in torch's layer; `qtoolkit.convert`
    renormalizes all rows once.

    Example:
        >>> layer = QuantEmbeddingBag(10, 4, mode="mean", weight_spec=qt.QuantSpec(axis=0))
        >>> layer(torch.tensor([1, 2, 9]), torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """

    FLOAT = nn.EmbeddingBag
    KIND = "embedding"

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Reduce the rows of each bag to their sum, mean or maximum."""
        return F.embedding_bag(
            x,
            weight,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=self.sparse and weight is self.weight,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
