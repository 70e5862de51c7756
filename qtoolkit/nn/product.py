"""Matrix products of two activations in training: what they keep for backward, and how they compute."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.on_codes import AS_ASKED, DEFAULT, NO_INT8, Source, TrainingArithmetic
from qtoolkit.ops.layer import Codes
from qtoolkit.ops.requantize import centred_codes
from qtoolkit.ops.sums import exact_matmul
from qtoolkit.quantizers.codes import TensorCodes, known_of, values_of
from qtoolkit.quantizers.quantizer import Quantizer


class Product:
    """A product of activations, as training computes it. Copies and pickles are to be linked again.

    Args:
        operands: How many tensors are multiplied.

    Attributes:
        arithmetic: How it computes, and what it keeps for backward.
        links: The source of each operand; None where that is not known.
    """

    def __init__(self, operands: int = 2) -> None:
        self.arithmetic = DEFAULT
        self.links: tuple[Source | None, ...] = (None,) * operands

    @property
    def sources(self) -> tuple[Quantizer | None, ...]:
        """For each operand the quantizer on whose grid its values lie, or None."""
        return tuple(None if link is None else link.now() for link in self.links)

    def __reduce__(self) -> tuple[Any, ...]:
        return Product, (len(self.links),)


def product_of(op: Callable[[Tensor, Tensor], Tensor], how: Product) -> Callable[..., Tensor]:
    """Return the function that computes an op, torch.matmul or another of its names, as `product` does.

    It takes what is known of the operands before them.
    """

    def computed(known: Sequence[TensorCodes | None], x: Tensor, other: Tensor) -> Tensor:
        return product(op, x, other, how.sources, how.arithmetic, known)

    return computed


def product(
    op: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    other: Tensor,
    sources: Iterable[Quantizer | None],
    arithmetic: TrainingArithmetic,
    known: Sequence[TensorCodes | None] = (None, None),
) -> Tensor:
    """Return a matrix product, keeping codes of the operands for backward where they are on grids and a gradient is needed.

    Values and gradients are those of the op, bit for bit; where the product is computed on codes, its values differ by
    rounding alone.

    Args:
        op: torch.matmul, or another function that computes the same for two batches of matrices.
        x: Tensor.
        other: Tensor. Where either is no batch of matrices, or they have different batch dimensions, the op is called.
        sources: For each operand the quantizer on whose grid its values lie, or None.
        arithmetic: How to compute, and what to keep.
        known: What is known of each operand.
    """
    grids = tuple(sources)
    integer = _on_integers(arithmetic, grids)
    if (not integer and arithmetic.save == "float") or not _fits(x, other):
        return op(x, other)
    operands = x.flatten(0, -3), other.flatten(0, -3)
    kept = [
        _codes_by_rows(operand, known_of(whole, source, of_whole))
        for operand, whole, source, of_whole in zip(operands, (x, other), grids, known, strict=True)
    ]
    if kept == [None, None]:
        return op(x, other)
    codes = [part for each in kept for part in _flat(each)]
    y: Tensor = _Product.apply(*operands, integer and None not in kept, autocast_type(x), *codes)
    return y.view(*x.shape[:-1], other.size(-1))


def described(sources: Iterable[Quantizer | None], arithmetic: TrainingArithmetic) -> str:
    """Return how a product computes in training and what it keeps for backward, in words."""
    grids = list(sources)
    known = [grid is not None and grid.capability.codes for grid in grids]
    if not any(known):
        return "float, saves floats: its operands are not quantized to at most 8 bits with one scale each"
    integer = all(known) and arithmetic.forward == "integer"
    reason = (AS_ASKED if arithmetic.forward == "float" else NO_INT8).text
    reason = reason if all(known) else "an operand is not quantized to at most 8 bits with one scale"
    keeps = "codes" if all(known) else "codes of one operand"
    forward = "int8 kernel" if integer else f"float ({reason})"
    return f"{forward}, saves {'floats' if arithmetic.save == 'float' and not integer else keeps}"


def _on_integers(arithmetic: TrainingArithmetic, sources: Iterable[Quantizer | None]) -> bool:
    """Return whether a product computes on codes, if both operands have them; torch has no int8 kernel of it for "auto"."""
    return arithmetic.forward == "integer" and all(source is None or source.training for source in sources)


def _fits(x: Tensor, other: Tensor) -> bool:
    if not (torch.is_grad_enabled() and is_ordinary(x) and is_ordinary(other)):
        return False
    if not (x.requires_grad or other.requires_grad) or x.dtype != other.dtype or x.device != other.device:
        return False
    if min(x.dim(), other.dim()) < 3 or x.shape[:-2] != other.shape[:-2]:
        return False
    return x.size(-1) == other.size(-2) and x.numel() > 0 and other.numel() > 0


def autocast_type(x: Tensor) -> torch.dtype:
    """Return the type in which autocast lets a product of x compute, or that of x."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def _by_rows(x: Tensor) -> Tensor:
    """Return a batch of matrices, transposed if that makes it contiguous: codes of 4 bits are packed by rows."""
    return x.transpose(1, 2) if _is_transposed(x) else x


def _codes_by_rows(x: Tensor, grid: TensorCodes | None) -> Codes | None:
    """Return the codes of a batch of matrices, in the order of `_by_rows`; None where its grid is not known."""
    if grid is None or grid.codes is None or grid.packed:
        return None if grid is None else grid.of(_by_rows(x))
    codes = grid.codes.flatten(0, -3)
    return grid.as_codes(codes.transpose(1, 2) if _is_transposed(x) else codes)


def _is_transposed(x: Tensor) -> bool:
    return not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


# ---- codes as autograd.Function takes them: tensors and numbers

Flat = tuple[Any, ...]  # codes, scale, zero point, the lowest and the highest code; None for what there is not


def _flat(codes: Codes | None) -> Flat:
    if codes is None:
        return None, None, None, 0, 0
    return codes.codes, codes.scale, codes.zero_point, codes.qmin, codes.qmax


class _Product(torch.autograd.Function):
    """torch.bmm of x and other in a dtype. Each operand is kept as its codes, where it has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, integer: bool, dtype: torch.dtype, *codes: Any) -> Tensor:
        """Return the product of two batches of matrices (n, rows, k) and (n, k, columns); `codes` are those of `_flat`."""
        grids = codes[:5], codes[5:]
        ctx.like = [(operand.dtype, _is_transposed(operand), _by_rows(operand).shape) for operand in (x, other)]
        ctx.dtype, ctx.ranges = dtype, [grid[3:] for grid in grids]
        a, b = x.to(dtype), other.to(dtype)
        kept = [
            (None, None, None) if not needed else grid[:3] if grid[0] is not None else (operand, None, None)
            # the gradient of the one takes the values of the other
            for operand, grid, needed in zip(
                (a, b), grids, (ctx.needs_input_grad[1], ctx.needs_input_grad[0]), strict=True
            )
        ]
        ctx.save_for_backward(*kept[0], *kept[1])
        return _on_codes(x, other, *grids).to(dtype) if integer else torch.bmm(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and other, from the values that the codes stand for."""
        saved, dx, dother = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            dx = grad.bmm(_values(ctx, 1, *saved[3:]).transpose(1, 2)).to(ctx.like[0][0])
        if ctx.needs_input_grad[1]:
            dother = _values(ctx, 0, *saved[:3]).transpose(1, 2).bmm(grad).to(ctx.like[1][0])
        return dx, dother, *[None] * 12


def _values(ctx: Any, place: int, codes: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    """Return an operand: what was kept, or what its codes stand for."""
    if scale is None:
        return codes
    dtype, transposed, shape = ctx.like[place]
    values = values_of(Codes(codes, scale, zero_point, *ctx.ranges[place]), shape, dtype).to(ctx.dtype)
    return values.transpose(1, 2) if transposed else values


def _on_codes(x: Tensor, other: Tensor, grid: Flat, grid_of_other: Flat) -> Tensor:
    """Return the product as runtimes compute it: exact sums of products of codes, times the product of the steps."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Values determine codes, and NaN stays NaN.
    centred, centred_other = (centred_codes(t.to(dtype), g[1]).float() for t, g in ((x, grid), (other, grid_of_other)))
    codes, codes_of_other = (
        (qmin, qmax) if zero_point is None else (qmin - qmax, qmax - qmin)
        for *_, zero_point, qmin, qmax in (grid, grid_of_other)
    )
    steps: Tensor = grid[1].to(dtype) * grid_of_other[1].to(dtype)
    return exact_matmul(centred, centred_other, codes, codes_of_other).to(dtype) * steps
