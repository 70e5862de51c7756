"""The batching rule of fake_quant under torch.vmap: one call for all samples instead of torch's fallback loop."""

from typing import Any

import torch
from torch import Tensor

from qtoolkit._native import library

_fake_quant = library.fake_quant.default


def _first(t: Tensor | None, dim: int | None) -> Tensor | None:
    """One sample, without its data."""
    return None if t is None else torch.empty_like(t if dim is None else t.select(dim, 0), device="meta")


def _rows(t: Tensor, dim: int | None, samples: int) -> Tensor:
    """Each sample's elements: (samples, elements)."""
    if dim is None:
        return t.reshape(1, t.numel()).expand(samples, -1)
    return t.movedim(dim, 0).reshape(samples, t.numel() // samples)


def fake_quant_of_samples(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    grad_factor: float = 1.0,
    mask: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Batching rule: if the samples share a grid, the axis moves by one; else their channels become groups of dimension 0."""
    if mask:
        raise NotImplementedError(
            "fake_quant: mask must be False under torch.vmap, got True, since the mask is packed across samples; call "
            "the op on the whole batch."
        )
    samples, named = info.batch_size, {"qmin": qmin, "qmax": qmax, "grad_factor": grad_factor}
    tensors = zip((x, scale, zero_point), in_dims, strict=False)
    _fake_quant(*(_first(t, d) for t, d in tensors), axis=axis, group=group, block_size=block_size, **named)  # checks
    x = x.expand(samples, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    axis = None if axis is None else axis % (x.dim() - 1)
    if in_dims[1] is None and in_dims[2] is None and group == 1 and block_size == 0:
        y = _fake_quant(x, scale, zero_point, axis=None if axis is None else axis + 1, **named)[0]
    else:
        scale = _rows(scale, in_dims[1], samples).reshape(-1)
        zero_point = None if zero_point is None else _rows(zero_point, in_dims[2], samples).reshape(-1)
        if axis is None or scale.numel() == samples:
            y = _fake_quant(x, scale, zero_point, axis=0, **named)[0]
        else:
            groups = 1 if axis == 0 or block_size > 0 else group * samples
            cut = {"axis": axis, "group": groups, "block_size": block_size}
            y = _fake_quant(x.flatten(0, 1), scale, zero_point, **cut, **named)[0].view_as(x)
    return (y, x.new_empty((samples, 0), dtype=torch.uint8)), (0, 0)
