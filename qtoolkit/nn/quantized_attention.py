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
from qtoolkit.nn.on_codes import TrainingArithmetic, TrainsOnCodes
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
            sources = (*of_scores, of_values[1])
            how = {"causal": causal, "dropout": self.dropout_p if self.training else 0.0}
            y = quantized_attention(
                run, operands, sources, operand_codes, mask, self.softmax_quantizer, arithmetic, **how
            )
            if y is not None:
                return _with_zeros(y, empty), None
        if causal:
            hidden = as_summand(_after_query(q, k), q.dtype)
            mask = hidden if mask is None else mask + hidden
        scores = product(run, torch.matmul, q, k.transpose(-2, -1), of_scores, arithmetic)
        weights = _with_zeros(torch.softmax(scores if mask is None else scores + mask, dim=-1), empty)
        dropped = F.dropout(quantized(self.softmax_quantizer, weights), self.dropout_p, self.training)
        return product(run, torch.matmul, dropped, v, of_values, arithmetic), dropped


def quantized_attention(
    run: Run,
    operands: tuple[Tensor, Tensor, Tensor],
    sources: Sequence[Quantizer | None],
    operand_codes: Sequence[TensorCodes | None],
    mask: Tensor | None,
    quantizer: Quantizer | None,
    arithmetic: TrainingArithmetic,
    *,
    causal: bool,
    dropout: float,
) -> Tensor | None:
    """Return softmax(query key^T + mask) on the grid of a quantizer, times the value.

    Backward keeps the operands as integers. On CUDA it computes the softmax again, in 16 bits by kernels that never write it;
    on a CPU it keeps it, since that takes 2 % of the step of a small transformer. Values and gradients are those of the ops
    one by one: bit for bit on a CPU, on CUDA up to the order of sums, and in 16 bits up to the rounding of products, which
    are rounded less often.

    Args:
        run: What runs the forward.
        operands: The scaled query (..., target, features), the key (..., source, features) and the value
            (..., source, features of the value).
        sources: The quantizer of each of them, or None.
        operand_codes: The integers of each of them, or None.
        mask: Added to the scores, or None.
        quantizer: Of the weights, or None.
        arithmetic: How to compute, and what to keep.
        causal: Whether a query takes the keys up to its own place alone.
        dropout: The probability with which a weight becomes zero.

    Returns:
        (..., target, features of the value); None where the op may not compute it.
    """
    if arithmetic.save == "float" or arithmetic.forward == "integer" or not _fits(run, operands, mask):
        return None
    if quantizer is not None and not may_be_in_op(quantizer, run):
        return None
    query, of_class = operands[0], torch.classes.qtoolkit.AttentionUnit
    if dropout and not of_class.fits_dropout(*operands, mask, autocast_type(query)):
        return None
    grid = grid_of(output_grid(run, quantizer, _scores_like(*operands[:2])))
    tensors: list[Tensor | None] = [mask, grid.start, grid.ratio, grid.rate, grid.zero_point]
    for operand, source, of_operand in zip(operands, sources, operand_codes, strict=True):
        found = tensor_codes_of(run, operand, source, of_operand)
        tensors += [operand, *of_codes(None if found is None else found.of_whole(operand, packs=False))]
    numbers = {name: getattr(grid, name) for name in ("qmin", "qmax", "grad_factor", "float16")}
    unit = _unit(autocast_type(query), query.is_cpu, grid.is_learned, causal, dropout, **numbers)
    y: Tensor = unit.call(tensors)
    return y


@functools.lru_cache(MOST_UNITS)
def _unit(
    dtype: torch.dtype, keeps_softmax: bool, learned: bool, causal: bool, dropout: float, **of_weights: float
) -> Any:
    """Return the library's unit of attentions with these numbers, to be called with `TENSORS`."""
    fields = {**dict.fromkeys(TENSORS), "dtype": dtype, "keeps_softmax": keeps_softmax, "learned": learned}
    fields |= {"causal": causal, "dropout": float(dropout)}
    fields |= {f"weights_{name}": number for name, number in of_weights.items()}
    return torch.classes.qtoolkit.AttentionUnit(fields, TENSORS)


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


def _after_query(query: Tensor, key: Tensor) -> Tensor:
    """Return which keys come after a query: (target, source)."""
    return torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).triu(1)


def _is_constant(run: Run, mask: Tensor) -> bool:
    return is_ordinary(run, mask) and mask.is_floating_point() and not mask.requires_grad


def _scores_like(query: Tensor, key: Tensor) -> Tensor:
    """Return a tensor of the shape of the scores, without memory."""
    return torch.empty(*query.shape[:-1], key.size(-2), dtype=torch.float32, device="meta")
