"""Linear layers in a module that holds their weights, as training computes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtoolkit.nn import on_codes
from qtoolkit.nn.layer_op import LayerOp, put_channels
from qtoolkit.nn.layers.linear import QuantLinear
from qtoolkit.nn.module import quantized
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.ops.layer import Geometry, WeightGrid
from qtoolkit.quantizers.codes import TensorCodes
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import Run

if TYPE_CHECKING:
    from qtoolkit.nn.attention import QuantMultiheadAttention


OUT = "out"
"""The name of the projection of the output."""
UPDATED = tuple(f"updated_{name}" for name in (*"qkv", OUT))
"""The attention's buffers of the channels that are updated, of each layer."""


class Projection(LayerOp):
    """A linear layer of an attention, for one call, with the attributes that `qtoolkit.nn.on_codes` reads.

    Args:
        attention: The attention.
        name: The letters of its inputs: some of "qkv", or "out".
        weight: Its weight, (out, in).
        quantizer: The weight's quantizer, or None.
        bias: Its bias, or None.
        source: The quantizer of its input, or None where that is not known.
        rows: The rows of which the weight is a part, with the number of the part; None if the weight is whole.
    """

    FLOAT: ClassVar[type[nn.Module]] = nn.Linear
    OP_KIND: ClassVar[OpKind] = QuantLinear.OP_KIND
    returns_channels_last: ClassVar[bool] = False
    batch_norm = None

    def __init__(
        self,
        attention: "QuantMultiheadAttention",
        name: str,
        weight: Tensor,
        quantizer: Quantizer | None,
        bias: Tensor | None,
        source: Quantizer | None,
        rows: "tuple[Rows, int] | None" = None,
    ) -> None:
        self.attention, self.name = attention, name
        self.training, self.training_arithmetic = attention.training, attention.training_arithmetic
        self.weight, self.weight_quantizer, self.bias, self.source = weight, quantizer, bias, source
        self.rows = rows

    @property
    def buffers(self) -> list[str]:
        """The names of the attention's buffers that have the updated channels, of each letter."""
        return [f"updated_{name}" for name in ([self.name] if self.name == OUT else self.name)]

    @property
    def layers(self) -> int:  # type: ignore[override]
        """The number of its letters."""
        return len(self.buffers)

    @property
    def updated_channels(self) -> Tensor | None:  # type: ignore[override]
        """The channels whose weights get gradients in training; None for all."""
        found = [self.attention._buffers[name] for name in self.buffers]
        parts = [part for part in found if part is not None]  # torch.compile reads no := in a comprehension
        if len(parts) < 2:
            return parts[0] if parts else None
        size = self.channels() // len(parts)
        return torch.cat([part + place * size for place, part in enumerate(parts)])

    def update_channels(self, channels: Tensor | None) -> None:
        size = self.channels() // self.layers
        for place, name in enumerate(self.buffers):
            own = channels
            if channels is not None:
                own = channels[(channels >= place * size) & (channels < (place + 1) * size)] - place * size
            put_channels(self.attention, name, own, self.weight.device)

    def split(self, names: Sequence[str]) -> list["Projection"]:
        """Return the projections of these names by parts of the rows; each letter of the names has as many."""
        if len(names) == 1:
            return [self]
        size = self.channels() // len(self.name)
        rows = Rows(self, [size * len(name) for name in names])
        weights: Sequence[Tensor] = self.weight.split_with_sizes(rows.sizes)
        biases = [None] * len(names) if self.bias is None else self.bias.split_with_sizes(rows.sizes)
        sources = [self.attention.source_of(self.name.index(name[0])) for name in names]
        parts = enumerate(zip(names, weights, biases, sources, strict=True))
        return [
            Projection(self.attention, name, weight, self.weight_quantizer, bias, source, (rows, part))
            for part, (name, weight, bias, source) in parts
        ]

    def __call__(self, run: Run, x: Tensor, input_codes: TensorCodes | None) -> Tensor:
        """Return the layer of x, which has these integers: in training by an op that keeps integers, where x has some."""
        y = on_codes.compute(run, self, x, lambda: self.source, None, lambda: self.bias, (), {}, input_codes)
        if y is not None:
            return y
        weight = on_codes.quantized_weight(run, self, None)
        if weight is None:
            weight = self.updated_weight(self.quantize_weight())
        return self.compute(x, weight, self.bias)

    def quantize_weight(self) -> Tensor:
        """Return the weight quantized by its quantizer."""
        if self.rows is None:
            return quantized(self.weight_quantizer, self.weight)  # type: ignore[no-any-return]  # a Tensor, as its argument
        rows, place = self.rows
        return rows.values()[place]

    def weight_grid(self, run: Run, factor: Tensor | None) -> WeightGrid | None:
        """Return the grid of the weight for an op that quantizes it; no factor multiplies it."""
        if self.rows is None:
            return on_codes.weight_grid(run, self, self.weight.detach)
        rows, place = self.rows
        return rows.grids(run)[place]

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        return F.linear(x, weight, bias)

    def geometry(self, x: Tensor, *args: object, **kwargs: object) -> Geometry | None:
        """Return the product for an op, or None for a single vector."""
        return Geometry() if x.dim() > 1 else None

    def source_at(self, call: int = 0) -> Quantizer | None:
        """Return the source: a projection has one call."""
        return self.source

    def sum_steps(self, call: int = 0) -> None:
        """Return None: the bias is added in float."""


class Rows:
    """The rows of a weight, which projections of several tensors share in a call: quantized once, at the first use.

    Args:
        whole: The projection by all rows.
        sizes: The numbers of rows of the parts.
    """

    def __init__(self, whole: Projection, sizes: list[int]) -> None:
        self.whole, self.sizes = whole, sizes
        quantizer = whole.weight_quantizer
        self.per_scale = 0 if quantizer is None else quantizer.spec.rows_per_scale(2)
        self.decided: list[Any] | None = None  # the parts of what a unit has decided about the weight
        self._grids: Sequence[WeightGrid | None] | None = None
        self._values: Sequence[Tensor] | None = None

    def split(self, scale: Tensor | None) -> Sequence[Tensor | None]:
        """Return the parts of the weight's scale, or of a tensor with an element for each of its scales.

        No two parts share a scale of some rows: blocks divide the rows of the output's projection, which are as many.
        """
        if scale is None or not self.per_scale:
            return [scale] * len(self.sizes)
        parts: Sequence[Tensor] = scale.split_with_sizes([size // self.per_scale for size in self.sizes])
        return parts

    def grids(self, run: Run) -> Sequence[WeightGrid | None]:
        """Return the grid of each part for an op; None where only the quantizer's forward can put the weight there."""
        if self._grids is None:
            grid = self.whole.weight_grid(run, None)
            self._grids = [None] * len(self.sizes) if grid is None else self._split_grid(grid)
        return self._grids

    def _split_grid(self, grid: WeightGrid) -> list[WeightGrid | None]:
        parts = zip(self.split(grid.scale), self.split(grid.zero_point), strict=True)
        return [None if scale is None else replace(grid, scale=scale, zero_point=zero) for scale, zero in parts]

    def values(self) -> Sequence[Tensor]:
        """Return the quantized weight of each part."""
        if self._values is None:
            self._values = self.whole.quantize_weight().split_with_sizes(self.sizes)
        return self._values
