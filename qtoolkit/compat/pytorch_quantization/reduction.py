"""pytorch_quantization.utils: largest magnitudes along axes, and the handlers of the root logger."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

Axis = int | Sequence[int] | None


@torch.no_grad()
def reduce_amax(input: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = True) -> Tensor:
    """Return the largest magnitude along some axes, or all for None; 0-d if there is one element.

    `keepdims` keeps these axes, with size 1. Raises ValueError: there are more axes than the tensor has.

    Example:
        >>> reduce_amax(torch.tensor([[1.0, -5.0], [2.0, 3.0]]), axis=1)
        tensor([[5.],
                [3.]])
    """
    axes = tuple(range(input.dim())) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    if len(axes) > input.dim():
        raise ValueError(
            f"Cannot reduce more axes than tensor's dim. Got the axes {list(axes)} for {input.dim()} dimensions."
        )
    magnitudes = input.abs()
    reduced = magnitudes.amax(axes, keepdim=keepdims) if axes else magnitudes  # amax(()) would reduce all axes
    return reduced.reshape(()) if reduced.numel() == 1 else reduced


def kept_axes(axis: Axis, dims: int) -> tuple[int, ...]:
    """Return the axes along which each index has its own range, as non-negative numbers; () for None."""
    axes = () if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple(sorted({a % dims for a in axes}))


def amax_along(x: Tensor, axis: Axis) -> Tensor:
    """Return the largest magnitude for each index of the axes, with x's dimensions; one magnitude for None."""
    kept = kept_axes(axis, x.dim())
    return reduce_amax(x, [d for d in range(x.dim()) if d not in kept])


def reset_logger_handler() -> None:
    """Remove all handlers of the root logger."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
