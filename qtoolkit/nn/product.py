"""Matrix products of two activations in training: what they keep for backward, and how they compute."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtoolkit._native import library
from qtoolkit.nn.hooks import is_ordinary
from qtoolkit.nn.on_codes import AS_ASKED, DEFAULT, NO_INT8, TrainingArithmetic
from qtoolkit.ops.layer import Codes
from qtoolkit.ops.requantize import centred_codes
from qtoolkit.ops.sums import exact_matmul
from qtoolkit.quantizers.codes import TensorCodes, tensor_codes_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run

if TYPE_CHECKING:
    from qtoolkit.nn.layer_call import Source

_product = library.product.default


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
        """The quantizer of each operand, or None."""
        return tuple(None if link is None else link.now() for link in self.links)

    def __reduce__(self) -> tuple[Any, ...]:
        return Product, (len(self.links),)


def product_of(op: Callable[[Tensor, Tensor], Tensor], how: Product) -> Callable[..., Tensor]:
    """Return the function that computes an op, torch.matmul or another of its names, as `product` does.

    It takes the run, and the integers of the operands or None, before them.
    """

    def computed(run: Run, operand_codes: Sequence[TensorCodes | None], x: Tensor, other: Tensor) -> Tensor:
        return product(run, op, x, other, how.sources, how.arithmetic, operand_codes)

    return computed


def product(
    run: Run,
    op: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    other: Tensor,
    sources: Iterable[Quantizer | None],
    arithmetic: TrainingArithmetic,
    operand_codes: Sequence[TensorCodes | None] = (None, None),
) -> Tensor:
    """Return a matrix product, keeping quantized operands as integers for backward where a gradient is needed.

    Values and gradients are the op's, bit for bit; where the product is computed in integers, its values differ by
    rounding alone.

    Args:
        run: What runs the forward.
        op: torch.matmul, or another function that computes the same for two batches of matrices.
        x: Tensor.
        other: Tensor. If either is no batch of matrices, or their batch dimensions differ, the op is called.
        sources: The quantizer of each operand, or None.
        arithmetic: How to compute, and what to keep.
        operand_codes: The integers of each operand, or None.
    """
    grids = tuple(sources)
    integer = _on_integers(arithmetic, grids)
    if (not integer and arithmetic.save == "float") or not _fits(run, x, other):
        return op(x, other)
    operands = x.flatten(0, -3), other.flatten(0, -3)
    codes = [
        _codes_by_rows(operand, tensor_codes_of(run, whole, source, of_whole))
        for operand, whole, source, of_whole in zip(operands, (x, other), grids, operand_codes, strict=True)
    ]
    if codes == [None, None]:
        return op(x, other)
    of_x, of_other = codes
    computed = _on_codes(*operands, of_x, of_other) if integer and of_x is not None and of_other is not None else None
    # The gradient of the one takes the values of the other.
    kept = [
        kept_operand(operand.to(autocast_type(x)), of_operand, needed, _is_transposed(operand))
        for operand, of_operand, needed in zip(operands, codes, (other.requires_grad, x.requires_grad), strict=True)
    ]
    y: Tensor = _product(*kept[0], *kept[1], computed)
    return y.view(*x.shape[:-1], other.size(-1))


def described(sources: Iterable[Quantizer | None], arithmetic: TrainingArithmetic) -> str:
    """Return how a product computes in training and what it keeps for backward, in words."""
    grids = list(sources)
    have_codes = [grid is not None and grid.capability.codes for grid in grids]
    if not any(have_codes):
        return "float, saves floats: its operands are not quantized to at most 8 bits with one scale each"
    integer = all(have_codes) and arithmetic.forward == "integer"
    reason = (AS_ASKED if arithmetic.forward == "float" else NO_INT8).text
    reason = reason if all(have_codes) else "an operand is not quantized to at most 8 bits with one scale"
    keeps = "integers" if all(have_codes) else "integers of one operand"
    forward = "int8 kernel" if integer else f"float ({reason})"
    return f"{forward}, saves {'floats' if arithmetic.save == 'float' and not integer else keeps}"


def _on_integers(arithmetic: TrainingArithmetic, sources: Iterable[Quantizer | None]) -> bool:
    """Return whether a product computes in integers, if both operands have some; torch has no int8 kernel of it for "auto"."""
    return arithmetic.forward == "integer" and all(source is None or source.training for source in sources)


def _fits(run: Run, x: Tensor, other: Tensor) -> bool:
    if not (torch.is_grad_enabled() and is_ordinary(run, x) and is_ordinary(run, other)):
        return False
    if not (x.requires_grad or other.requires_grad) or x.dtype != other.dtype or x.device != other.device:
        return False
    if x.dtype not in (torch.float32, autocast_type(x)):  # rounded twice on the way to autocast's type
        return False
    if min(x.dim(), other.dim()) < 3 or x.shape[:-2] != other.shape[:-2]:
        return False
    return x.size(-1) == other.size(-2) and x.numel() > 0 and other.numel() > 0


def autocast_type(x: Tensor) -> torch.dtype:
    """Return the type in which autocast lets a product of x compute, or x's own type."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def _codes_by_rows(x: Tensor, grid: TensorCodes | None) -> Codes | None:
    """Return the integers of a batch of matrices, transposed if that makes it contiguous; None where its grid is not known.

    Integers of 4 bits are packed by rows.
    """
    if grid is None:
        return None
    transposed = _is_transposed(x)
    if grid.codes is None or grid.packed:
        return grid.of(x.transpose(1, 2)) if transposed else grid.of_whole(x)
    codes = grid.codes.flatten(0, -3)
    return grid.as_codes(codes.transpose(1, 2) if transposed else codes)


def _is_transposed(x: Tensor) -> bool:
    return not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def kept_operand(x: Tensor, codes: Codes | None, needed: bool, transposed: bool = False) -> tuple[Any, ...]:
    """Return the arguments of the library's `product` for an operand.

    Args:
        x: The operand.
        codes: Its integers, in its own order or packed in the order of its memory, or None.
        needed: Whether the gradient of another operand takes its values.
        transposed: Whether its integers are in the order of its transposed matrices.
    """
    if codes is None or not needed:
        return x, *of_codes(None), x.shape, True, False, needed
    size = x.transpose(-2, -1).shape if transposed else x.shape
    return x, *of_codes(codes), size, codes.qmin < 0, transposed, False


def of_codes(codes: Codes | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return integers with their scale and their zero point, as ops take them."""
    return (None, None, None) if codes is None else (codes.codes, codes.scale, codes.zero_point)


def _on_codes(x: Tensor, other: Tensor, grid: Codes, grid_of_other: Codes) -> Tensor:
    """Return the product as runtimes compute it: exact integer sums, times the product of the steps."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Values determine the integers, and NaN stays NaN.
    grids = (grid, grid_of_other)
    centred = [centred_codes(t.detach().to(dtype), g.scale).float() for t, g in zip((x, other), grids, strict=True)]
    ends = [(g.qmin, g.qmax) if g.zero_point is None else (g.qmin - g.qmax, g.qmax - g.qmin) for g in grids]
    steps: Tensor = grid.scale.to(dtype) * grid_of_other.scale.to(dtype)
    return exact_matmul(centred[0], centred[1], *ends).to(dtype) * steps
