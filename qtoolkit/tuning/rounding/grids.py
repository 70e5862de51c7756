"""The grid of a weight, element by element, and the choice of its rounding."""

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import divisor_of
from qtoolkit.quantizers.spec_ops import clip, per_element
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

# The rectified sigmoid of AdaRound (arXiv 2004.10568, section 3.3): it reaches 0 and 1.
LOW, HIGH = -0.1, 1.1


def codes_on_grid(quantizer: TensorQuantizer, x: Tensor) -> Tensor:
    """Quantize a tensor to int32 by rounding to nearest."""
    spec = quantizer.spec
    grid = (spec.qmin, spec.qmax, spec.axis, quantizer.group, spec.block_size)
    return ops.quantize(x, quantizer.scale, quantizer.zero_point, *grid, torch.int32)


class CodeGrid:
    """The grid of a layer's weight, with the step and the zero point of each element: `steps`, `zeros`.

    `weight` is the input of the quantizer, in float32 or float64. Raises RuntimeError: the quantizer is not calibrated.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        quantizer = layer.weight_quantizer if isinstance(layer, QuantWeighted) else None
        if not isinstance(layer, QuantWeighted) or not isinstance(quantizer, TensorQuantizer):
            raise TypeError(f"layer {name!r} has no weight quantizer.")
        quantizer.check_ready()
        self.layer, self.name, self.quantizer = layer, name, quantizer
        with torch.no_grad():
            self.weight = layer.effective_weight().detach().to(quantizer.scale.dtype)
            self.steps = self._each(quantizer.scale)
            self.zeros = self._each(quantizer.zero_point)

    def _each(self, values: Tensor | None) -> Tensor:
        """Return the value of each element of the weight; zeros for None."""
        zeros, q = torch.zeros_like(self.weight), self.quantizer
        return zeros if values is None else zeros + per_element(values, zeros, q.spec, q.group)

    def clamp(self, codes: Tensor) -> Tensor:
        """Return integers, including the zero point, clipped to the range of the spec."""
        return clip(codes, float(self.quantizer.spec.qmin), float(self.quantizer.spec.qmax))

    def nearest(self) -> Tensor:
        """Return the integers of rounding to nearest."""
        return codes_on_grid(self.quantizer, self.weight).to(self.weight.dtype)

    def values(self, codes: Tensor) -> Tensor:
        """Dequantize integers."""
        return (codes - self.zeros) * self.steps

    def store(self, codes: Tensor) -> None:
        """Move the layer's weight onto the grid, so that rounding to nearest gives these integers; keep the range.

        Raises ValueError: the weight's dtype is too coarse to distinguish the integers.
        """
        with torch.no_grad():
            values, bn = self.values(codes), self.layer.batch_norm
            if bn is not None:  # the quantizer sees the weight times the batch norm's factor
                values = values / self.layer.scale_output_channels(torch.ones_like(values), divisor_of(bn))
            self.layer.weight.copy_(values)
        self.quantizer.following = False
        if not torch.equal(CodeGrid(self.layer, self.name).nearest(), codes):
            raise ValueError(
                f"layer {self.name!r}: its {self.layer.weight.dtype} weight is too coarse for {self.quantizer.spec.bits} bits; "
                "convert the model with model.float() first."
            )


class SoftRounding(nn.Module):
    """Weights between their two neighbouring grid values: rounded down plus the rectified sigmoid of a variable.

    The variables, of the weight's shape, start such that the values equal the float weight.
    """

    def __init__(self, grid: CodeGrid) -> None:
        super().__init__()
        self.grid = grid
        ratio = grid.weight / grid.steps
        self.down = torch.floor(ratio) + grid.zeros
        share = (ratio - torch.floor(ratio) - LOW) / (HIGH - LOW)
        self.variable = nn.Parameter(torch.log(share / (1 - share)))

    def up(self) -> Tensor:
        """Return the fraction by which each weight is rounded up, from 0 to 1."""
        return clip(torch.sigmoid(self.variable) * (HIGH - LOW) + LOW, 0.0, 1.0)

    def forward(self) -> Tensor:
        return self.grid.values(self.grid.clamp(self.down + self.up()))

    def codes(self) -> Tensor:
        """Return the integers that the variables determine."""
        return self.grid.clamp(self.down + (self.variable.detach() >= 0))

    def undecided(self, beta: float) -> Tensor:
        """Return the regularizer: the sum of 1 - |2 h - 1|^beta, which is 0 if every weight is on the grid."""
        return (1 - (2 * self.up() - 1).abs().pow(beta)).sum()
