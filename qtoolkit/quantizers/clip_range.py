"""The range of a quantizer: what it clips, and what it replaces."""

import torch
from torch import Tensor

from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.observers.base import Observer
from qtoolkit.quantizers.spec_ops import range_of
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def clip_range(quantizer: TensorQuantizer | Grid) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value that a quantizer does not clip, of the scale's shape; NaN without a range.

    Example:
        >>> quantizer = TensorQuantizer(qt.QuantSpec(bits=4))
        >>> quantizer.amax = 7.0
        >>> clip_range(quantizer)
        (tensor(-8.), tensor(7.))
    """
    if isinstance(quantizer, TensorQuantizer):
        return quantizer.kind.input_ends(quantizer)
    return range_of(quantizer.spec, quantizer.scale, quantizer.zero_point)


def share_clipped(quantizer: TensorQuantizer | Grid, observer: Observer) -> float | None:
    """Return the share of the values that an observer saw beyond a grid by more than half a step; None if it cannot tell."""
    low, high = clip_range(quantizer)
    half = quantizer.scale / 2
    return observer.share_outside(low - half, high + half)


def saturates(low: float, high: float, grid: Grid) -> bool:
    """Return whether quantizing clips a tensor at least as far as the bounds [low, high] of an activation before it do.

    No quantized value then changes if the activation is left out. NaN gives False; the grid has one scale. Source: onnxruntime,
    IsClipMadeRedundantByQ in core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc, with the range of this grid.

    Example:
        >>> grid = Grid(torch.tensor(0.0235), torch.tensor(0.0), qt.QuantSpec(signed=False, symmetric=False))
        >>> saturates(0.0, 6.0, grid), saturates(0.0, 5.9, grid)
        (True, False)
    """
    bounds = torch.tensor([low, high], device=grid.scale.device)
    codes = grid.codes(bounds).tolist()
    return codes == [grid.spec.qmin, grid.spec.qmax] and not bool(bounds.isnan().any())
