"""Embeddings: a table whose rows are quantized, each with a scale of its own (axis 0) or all with one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizer import TensorQuantizer


class QuantEmbedding(QuantWeighted, nn.Embedding):
    """torch.nn.Embedding with a quantized table; `weight_spec`'s axis 0 is the row.

    With `sparse=True` the gradient of the table is sparse as in torch's layer: only the rows that are looked up are
    quantized. With `max_norm` the rows that are looked up are renormalized in place first, as in torch's layer.

    Example:
        >>> layer = QuantEmbedding(10, 4, padding_idx=0, weight_spec=qt.QuantSpec(axis=0))
        >>> layer(torch.tensor([[1, 0, 9]])).shape
        torch.Size([1, 3, 4])
    """

    FLOAT = nn.Embedding
    KIND = "embedding"

    bias = None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Look up the rows x."""
        return F.embedding(x, weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Look up quantized rows."""
        self._renormalize(input)
        quantizer = self.weight_quantizer
        if self.sparse and self.training and isinstance(quantizer, TensorQuantizer):
            rows = quantizer.rows(self.compute(input.flatten(), self.weight, None), input.flatten(), self.weight)
            return rows.reshape(*input.shape, self.embedding_dim)
        return super().forward(input)

    def forward_fp32(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Look up float rows."""
        self._renormalize(input)
        return super().forward_fp32(input)

    def _renormalize(self, input: Tensor) -> None:
        if self.max_norm is not None:
            with torch.no_grad():  # F.embedding documents that it changes the rows in place
                F.embedding(input, self.weight, self.padding_idx, self.max_norm, self.norm_type)
