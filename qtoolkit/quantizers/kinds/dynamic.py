"""Scales of activations that are computed from each input."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import BLOCKS
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.observers.none import NoObserver
from qtoolkit.quantizers.spec_ops import grid_of_range

if TYPE_CHECKING:
    from qtoolkit.quantizers.ranged import RangedQuantizer


class Dynamic(QuantizerKind):
    """The scale of each token (all features at one place: the last dimension), or of each block, comes from its own range.

    Nothing is calibrated. The gradient of x passes straight through, with the scales as constants.
    """

    PLAIN = False
    LEARNED = False

    def observer_type(self, spec: QuantSpec, of_weight: bool = False) -> type[NoObserver]:
        return NoObserver

    def tensors(self, spec: QuantSpec, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return a scale of 1, which nothing uses."""
        return {**super().tensors(spec, shape), "_scale": torch.ones(()), "_zero_point": None}

    def set_grid(self, quantizer: "RangedQuantizer", scale: Tensor, zero_point: Tensor | None) -> None:
        quantizer._scale.fill_(1)

    def input_ends(self, quantizer: "RangedQuantizer") -> tuple[Tensor, Tensor]:
        """Return an infinite range: nothing is clipped."""
        end = torch.full_like(quantizer._scale, torch.inf)
        return -end, end

    def quantize(self, quantizer: "RangedQuantizer", x: Tensor) -> Tensor:
        """Return x with each token, or block, on a grid of its own."""
        if quantizer.spec.format not in BLOCKS:
            return of_tokens(quantizer.spec, x)
        quantizer.scale_shape(x)  # blocks that do not fit are an error
        return of_blocks(quantizer.spec, x)


def of_tokens(spec: QuantSpec, x: Tensor) -> Tensor:
    """Return x quantized with a scale for each row of the last dimension; an int format in one op.

    Example:
        >>> of_tokens(qt.QuantSpec(bits=4, dynamic=True), torch.tensor([[0.6, 7.0], [0.06, 0.7]]))
        tensor([[1.0000, 7.0000],
                [0.1000, 0.7000]])
    """
    if x.dim() == 0:
        return of_tokens(spec, x.reshape(1)).reshape(())
    if x.numel() == 0:
        return x.clone()
    features = x.size(-1)
    like = torch.empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if spec.format != "int":
        lo, hi = (end.to(like.dtype) for end in ops.minmax(x.detach(), -1, 1, features))
        scale, _ = grid_of_range(lo, hi, spec)
        return ops.fake_quant_float(x, scale.reshape(like.shape), spec.format, -1, 1, features)
    lo, hi, scale = torch.full_like(like, torch.inf), torch.full_like(like, -torch.inf), torch.ones_like(like)
    zero_point = None if spec.symmetric else torch.zeros_like(like)
    return ops.observe_fake_quant(
        x, lo, hi, scale, zero_point, spec.qmin, spec.qmax, None, spec.pow2_scale, -1, 1, features
    )


def of_blocks(spec: QuantSpec, x: Tensor) -> Tensor:
    """Return x in a block format, along the spec's axis, which the size of a block divides.

    Example:
        >>> of_blocks(qt.QuantSpec(format="mxfp4"), torch.tensor([0.3, -1.0, 3.1, 13.0]).repeat(8))[:4]
        tensor([ 0., -1.,  3., 12.])
    """
    block, axis = BLOCKS[spec.format], spec.axis if spec.axis is not None else -1
    rows = x.movedim(axis, -1)
    of_tensor = None
    if block.scale_format != "e8m0" and x.numel() > 0:
        largest = torch.stack(ops.minmax(x.detach())).abs().amax()
        of_tensor = (largest / (block.largest * 448)).clamp(min=2**-126)
    return ops.fake_quant_block(rows, block.element, block.size, block.scale_format, of_tensor).movedim(-1, axis)
