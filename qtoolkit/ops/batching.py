"""fake_quant under torch.vmap: one call for all samples, where torch's fallback would loop over them."""

from typing import Any

import torch
from torch import Tensor

from qtoolkit._native import library

_fake_quant = library.fake_quant.default


def _rows(t: Tensor, dim: int | None, samples: int) -> Tensor:
    """Each sample's elements: (samples, elements)."""
    if dim is None:
        return t.reshape(1, t.numel()).expand(samples, -1)
    return t.movedim(dim, 0).reshape(samples, t.numel() // samples)


def _check_sample(*tensors: Tensor | None, **rest: Any) -> None:
    """Raise what the op says of one sample by itself."""
    sample = [None if t is None else torch.empty_like(t[0], device="meta") for t in tensors]
    _fake_quant(*sample, **rest)


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
    grad_factor: float = 1.0,
    mask: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Batching rule: where samples share a grid the axis moves by one; else their channels become groups of dimension 0."""
    if mask:
        raise NotImplementedError(
            "fake_quant: mask must be False under torch.vmap, got True, since bits are packed across samples; call the "
            "op on the whole batch."
        )
    samples, named = info.batch_size, {"qmin": qmin, "qmax": qmax, "grad_factor": grad_factor}
    x = x.expand(samples, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    scales = _rows(scale, in_dims[1], samples)
    zero_points = None if zero_point is None else _rows(zero_point, in_dims[2], samples)
    _check_sample(x, scales, zero_points, axis=axis, group=group, **named)
    axis = None if axis is None else axis % (x.dim() - 1)
    if in_dims[1] is None and in_dims[2] is None and group == 1:
        y = _fake_quant(x, scale, zero_point, axis=None if axis is None else axis + 1, **named)[0]
    else:
        scale, zero_point = scales.reshape(-1), None if zero_points is None else zero_points.reshape(-1)
        if axis is None or scale.numel() == samples:
            y = _fake_quant(x, scale, zero_point, axis=0, **named)[0]
        else:
            group = group * samples if axis > 0 else 1
            y = _fake_quant(x.flatten(0, 1), scale, zero_point, axis=axis, group=group, **named)[0].view_as(x)
    return (y, x.new_empty((samples, 0), dtype=torch.uint8)), (0, 0)
