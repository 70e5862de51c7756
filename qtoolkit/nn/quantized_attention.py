"""The products of an attention with quantized operands; in training one op, which keeps query, key and value alone."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.module import quantized
from qtoolkit.nn.on_codes import TrainsOnCodes
from qtoolkit.nn.output_grid import grid_of, may_be_in_op, output_grid
from qtoolkit.nn.product import autocast_type, of_codes, product
from qtoolkit.quantizers.codes import TensorCodes, tensor_codes_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run

TENSORS = (
    *("mask", "weights_start", "weights_ratio", "weights_rate", "weights_zero_point"),
    *(f"{name}{part}" for name in "qkv" for part in ("", "_codes", "_scale", "_zero_point")),
)
"""The tensors of an attention, by the names of the fields of the library's unit (csrc/unit/unit.h)."""

MOST_UNITS = 64
"""Of attentions with different numbers, which depend on the sizes of scores."""


class Attends(TrainsOnCodes):
    """An attention whose matrix products have quantized operands: the scaled query, key, attention weights and value."""

    query_quantizer: Quantizer | None
    key_quantizer: Quantizer | None
    value_quantizer: Quantizer | None
    softmax_quantizer: Quantizer | None
    dropout_p: float
    training: bool

    @property
    def products(self) -> tuple[tuple[Quantizer | None, Quantizer | None], ...]:
        """The quantizers of the operands of both matrix products; in training none for dropout's output."""
        drops = self.dropout_p and self.training
        return (
            (self.query_quantizer, self.key_quantizer),
            (None if drops else self.softmax_quantizer, self.value_quantizer),
        )

    def _attend(
        self,
        run: Run,
        operands: tuple[Tensor, Tensor, Tensor],
        operand_codes: Sequence[TensorCodes | None],
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        in_one_op: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values, and the attention weights, quantized and with dropout in training.

        `mask` is added to the scores before the softmax. A row of it that masks all keys gives zeros, as in torch's function,
        not the NaN of a softmax. If `causal`, a query takes the keys up to its own place. With `in_one_op` one op may do all,
        which returns no attention weights.
        """
        (q, k, v), arithmetic, (of_scores, of_values) = operands, self.training_arithmetic, self.products
        mask, empty = _without_empty_rows(mask)
        if in_one_op:
            y = quantized_attention(run, self, operands, operand_codes, mask, causal)
            if y is not None:
                return _with_zeros(y, empty), None
        if causal:
            after = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
            mask = as_summand(after, q.dtype) if mask is None else mask.masked_fill(after, -math.inf)
        scores = product(run, torch.matmul, q, k.transpose(-2, -1), of_scores, arithmetic)
        weights = _with_zeros(torch.softmax(scores if mask is None else scores + mask, dim=-1), empty)
        dropped = F.dropout(quantized(self.softmax_quantizer, weights), self.dropout_p, self.training)
        return product(run, torch.matmul, dropped, v, of_values, arithmetic), dropped


def quantized_attention(
    run: Run,
    attention: Attends,
    operands: tuple[Tensor, Tensor, Tensor],
    operand_codes: Sequence[TensorCodes | None],
    mask: Tensor | None,
    causal: bool,
) -> Tensor | None:
    """Return softmax(query key^T + mask) on the grid of a quantizer, times the value.

    Backward keeps the operands as integers. On CUDA it computes the softmax again, in 16 bits by kernels that never write the
    scores. On a CPU it keeps the softmax: to compute it again takes 2 % of the step of a small transformer. The ops one by
    one have the same values and gradients: bit for bit on a CPU, on CUDA up to the order of sums, and in 16 bits up to the
    rounding of products, which are rounded less often.

    Args:
        run: What runs the forward.
        attention: Has the quantizers, the dropout, how to compute and what to keep.
        operands: The scaled query (..., target, features), the key (..., source, features) and the value
            (..., source, features of the value).
        operand_codes: The integers of each of them, or None.
        mask: Added to the scores, or None.
        causal: Whether a query takes only the keys up to its own place.

    Returns:
        (..., target, features of the value); None where the op may not compute it.
    """
    arithmetic, quantizer = attention.training_arithmetic, attention.softmax_quantizer
    if arithmetic.save == "float" or arithmetic.forward == "integer" or not _fits(run, operands, mask):
        return None
    if quantizer is not None and not may_be_in_op(quantizer, run):
        return None
    dtype, dropout = autocast_type(operands[0]), float(attention.dropout_p if attention.training else 0)
    if dropout and not torch.classes.qtoolkit.AttentionUnit.fits_dropout(*operands, mask, dtype):
        return None
    grid = grid_of(output_grid(run, quantizer, _scores_like(*operands[:2])))
    tensors: list[Tensor | None] = [mask, grid.start, grid.ratio, grid.rate, grid.zero_point]
    sources = (attention.query_quantizer, attention.key_quantizer, attention.value_quantizer)
    for operand, source, of_operand in zip(operands, sources, operand_codes, strict=True):
        found = tensor_codes_of(run, operand, source, of_operand)
        tensors += [operand, *of_codes(None if found is None else found.of_whole(operand, packs=False))]
    of_weights = {f"weights_{name}": getattr(grid, name) for name in ("qmin", "qmax", "grad_factor", "float16")}
    how = {"dtype": dtype, "keeps_softmax": operands[0].is_cpu, "causal": causal, "dropout": dropout}
    y: Tensor = _unit(learned=grid.is_learned, **how, **of_weights).call(tensors)
    return y


@functools.lru_cache(MOST_UNITS)
def _unit(**numbers: object) -> Any:
    """Return the library's unit of attentions with these numbers, to be called with `TENSORS`."""
    return torch.classes.qtoolkit.AttentionUnit({**dict.fromkeys(TENSORS), **numbers}, TENSORS)


def as_summand(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the summand that masks scores where a tensor of booleans is True."""
    return torch.zeros_like(masked, dtype=dtype).masked_fill(masked, -math.inf)


def without_keys(mask: Tensor) -> Tensor:
    """Return for which queries a mask, of booleans (True: takes part) or summands, masks all keys: (..., target, 1)."""
    return ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else mask.amax(-1, keepdim=True) == -math.inf


def _without_empty_rows(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask with zeros in the rows that mask all keys, and which rows these are: (..., target, 1)."""
    if mask is None:
        return None, None
    empty = without_keys(mask)
    return mask.masked_fill(empty, 0.0), empty


def _with_zeros(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.masked_fill(rows, 0.0)


def _fits(run: Run, operands: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> bool:
    if run.compiled or not torch.is_grad_enabled() or not all(is_ordinary(run, x) for x in operands):
        return False
    if not any(x.requires_grad for x in operands) or (mask is not None and not _is_constant(run, mask)):
        return False
    query = operands[0]
    same = all((x.dtype, x.device, x.shape[:-2]) == (query.dtype, query.device, query.shape[:-2]) for x in operands)
    return same and query.dim() >= 3 and all(x.numel() for x in operands)


def _is_constant(run: Run, mask: Tensor) -> bool:
    return is_ordinary(run, mask) and mask.is_floating_point() and not mask.requires_grad


def _scores_like(query: Tensor, key: Tensor) -> Tensor:
    """Return a tensor of the shape of the scores, without memory."""
    return torch.empty(*query.shape[:-1], key.size(-2), dtype=torch.float32, device="meta")
