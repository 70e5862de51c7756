"""Codes of a tensor on a grid, handed from the quantizer to the layers that take the tensor.

They live as long as the tensor does. Values determine codes, so a layer that is handed none computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from qtoolkit import ops
from qtoolkit.ops.layer import Codes, RawInput
from qtoolkit.quantizers.frozen import code_dtype
from qtoolkit.quantizers.quantizer import Quantizer


@dataclass(slots=True)
class Handed:
    """What is handed over with a tensor: its grid, its codes once they are known, its version then, what it was before."""

    scale: Tensor
    zero_point: Tensor | None
    qmin: int
    qmax: int
    packed: bool
    codes: Tensor | None
    version: int
    raw: RawInput | None = None
    raw_version: int = 0


_handed = WeakTensorKeyDictionary()  # a cache: without it layers compute the codes again


def hand_over(
    y: Tensor,
    codes: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    quantizer: Quantizer,
    raw: RawInput | None = None,
) -> None:
    """Keep the codes of a tensor with it; not in compiled code, which has no use for a cache.

    Args:
        y: Values on the grid.
        codes: Their codes, int8 or uint8, a byte each, or None.
        scale: The step between codes, of either sign, as `QuantizerKind.grid` returns it.
        zero_point: The zero point, which is rounded, or None.
        quantizer: Whose they are, with `Capability.codes`.
        raw: What the values were before, if only the scale has a gradient.
    """
    if torch.compiler.is_compiling() or y.is_inference():
        return
    _handed[y] = handed_as(_own(scale), zero_point, quantizer, codes, y._version, raw)


def handed_with(y: Tensor) -> Handed | None:
    """Return the grid and the codes that were kept with a tensor; None without any, or for a tensor that has changed since."""
    found: Handed | None = _handed.get(y)  # type: ignore[no-untyped-call]
    return found if found is not None and found.version == y._version else None


def keep(y: Tensor, handed: Handed) -> None:
    """Hand over with a tensor what is known of it."""
    if y not in _handed:
        _handed[y] = handed


def handed_as(
    scale: Tensor,
    zero_point: Tensor | None,
    quantizer: Quantizer,
    codes: Tensor | None,
    version: int,
    raw: RawInput | None = None,
) -> Handed:
    """Return what is handed over with a tensor of this version, whose scale is positive and belongs to nobody else."""
    zero = None if zero_point is None else zero_point.detach().round()
    spec, packed = quantizer.spec, quantizer.capability.packed
    known = None if packed else codes
    raw_version = 0 if raw is None else raw.values._version
    return Handed(scale, zero, spec.qmin, spec.qmax, packed, known, version, raw, raw_version)


def hand_on(x: Tensor, y: Tensor) -> None:
    """Hand over with y that its values lie on the grid of x, if that was handed over: those of a max pool do."""
    found = None if torch.compiler.is_compiling() or y.is_inference() else _grid_of(x, None)
    if found is not None:
        _handed[y] = replace(found, codes=None, version=y._version, raw=None)


def codes_of(y: Tensor, quantizer: Quantizer | None, channels_last: bool) -> Codes | None:
    """Return the codes of a tensor: those handed over with it, or else computed.

    Args:
        y: The tensor.
        quantizer: The quantizer on whose grid its values lie where nothing was handed over; None if that is not known.
        channels_last: Whether the codes of an image are wanted in this memory format.

    Returns:
        The codes, two per byte for at most 4 bits; None where the grid is not known or has no codes of a byte.
    """
    found = grid_with_codes(y, quantizer, channels_last)
    if found is None or found.codes is None:
        return None
    return Codes(found.codes, found.scale, found.zero_point, found.qmin, found.qmax)


def grid_with_codes(
    y: Tensor, quantizer: Quantizer | None, channels_last: bool, handed: Handed | None = None
) -> Handed | None:
    """Return what was handed over with a tensor, with its codes; the other arguments are those of `codes_of`.

    `handed` is what a unit returned with the tensor. It is left out if the tensor has changed since.
    """
    if handed is not None and handed.version == y._version:
        _complete(y, handed, channels_last)
        return handed
    found = _grid_of(y, quantizer)
    if found is None:
        return None
    known = found.codes
    _complete(y, found, channels_last)
    if found.codes is not known and not torch.compiler.is_compiling() and not y.is_inference():
        _handed[y] = found
    return found


def _complete(y: Tensor, handed: Handed, channels_last: bool) -> None:
    codes = handed.codes
    if codes is None:
        codes = _computed(y, handed)
    if channels_last and codes.dim() == 4:
        codes = codes.contiguous(memory_format=torch.channels_last)
    handed.codes = codes


def _own(scale: Tensor) -> Tensor:
    """Return the magnitude of a scale in a tensor of its own: an observer may change that of its quantizer."""
    return scale.detach().abs()


def raw_of(y: Tensor) -> RawInput | None:
    """Return what a tensor was before it was quantized; None where that is not known, or somebody waits for its gradient."""
    found: Handed | None = None if torch.compiler.is_compiling() else _handed.get(y)  # type: ignore[no-untyped-call]
    if found is None or found.raw is None or found.version != y._version or y._backward_hooks or y.retains_grad:
        return None
    return found.raw if found.raw.values._version == found.raw_version else None  # autograd says that it was changed


def codes_of_values(part: Tensor, y: Tensor, quantizer: Quantizer | None, packs: bool = True) -> Codes | None:
    """Return the codes of a tensor that has values of another one, y, whose arguments are those of `codes_of`.

    Without `packs` each code has a byte.
    """
    found = _grid_of(y, quantizer)
    if found is None:
        return None
    known = found.codes if part is y and not (packs and found.packed) else None
    codes = _computed(part, found if packs else replace(found, packed=False)) if known is None else known
    return Codes(codes, found.scale, found.zero_point, found.qmin, found.qmax)


def values_of(codes: Codes, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of codes of a tensor of this size and dtype."""
    if codes.codes.dim() == 1 < len(size):  # packed ones have one dimension
        return ops.dequantize_int4(codes.codes, size, codes.scale, codes.zero_point, codes.qmin < 0, dtype=dtype)
    return ops.dequantize(codes.codes, codes.scale, codes.zero_point, dtype=dtype)


def _grid_of(y: Tensor, quantizer: Quantizer | None) -> Handed | None:
    if torch.compiler.is_compiling():
        return _grid_now(y, quantizer)
    found: Handed | None = _handed.get(y)  # type: ignore[no-untyped-call]
    if found is not None and (y.is_inference() or found.version == y._version):
        return found
    return _grid_now(y, quantizer)


def _grid_now(y: Tensor, quantizer: Quantizer | None) -> Handed | None:
    if quantizer is None or not quantizer.capability_now.codes:
        return None
    version = 0 if torch.compiler.is_compiling() or y.is_inference() else y._version
    return handed_as(_own(quantizer.scale), quantizer.zero_point, quantizer, None, version)


def _computed(y: Tensor, grid: Handed) -> Tensor:
    y = y.detach()
    if grid.packed:
        return ops.quantize_int4(y, grid.scale, grid.zero_point, grid.qmin, grid.qmax)
    dtype = code_dtype(grid.qmin, grid.qmax)
    return ops.quantize(y, grid.scale, grid.zero_point, grid.qmin, grid.qmax, dtype=dtype)
