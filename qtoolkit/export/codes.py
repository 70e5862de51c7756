"""Integer codes side by side: how many differ, and which of a file's nodes stands for a quantizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qtoolkit.nn import QuantModule
from qtoolkit.quantizers.frozen import Grid

# A convolution's sum may round differently in two runtimes, and so fall on the other side of a tie: one step, rarely.
TIE_SHARE = 1e-4
TIES_IN_SMALL_TENSORS = 4
TIE_BAND = 2**-10  # of a step: what float32 sums over a range of 255 steps differ by, and more


@dataclass(frozen=True)
class CodeCount:
    """How many codes were compared, how many differ, and by how many steps at the most.

    `ties` of those that differ are of values within TIE_BAND of a rounding boundary. A linear resize of values on a grid, for
    one, has every eighth value there.
    """

    compared: int = 0
    differing: int = 0
    steps: int = 0
    ties: int = 0

    def __add__(self, other: "CodeCount") -> "CodeCount":
        return CodeCount(
            self.compared + other.compared,
            self.differing + other.differing,
            max(self.steps, other.steps),
            self.ties + other.ties,
        )

    @property
    def share(self) -> float:
        """Share of the codes that differ."""
        return self.differing / max(self.compared, 1)

    @classmethod
    def of(cls, ours: Any, theirs: Any, near: Any = False) -> "CodeCount":
        """Count the differences between two arrays of codes; `near` says whose values are near a rounding boundary."""
        gap = np.abs(np.asarray(ours, np.int64) - np.asarray(theirs, np.int64))
        return cls(gap.size, int((gap > 0).sum()), int(gap.max(initial=0)), int(((gap > 0) & near).sum()))

    def are_ties(self) -> bool:
        """Return whether rounding ties explain the differences: of one step, and but for few at rounding boundaries."""
        apart = self.differing - self.ties
        return self.steps <= 1 and apart <= max(TIES_IN_SMALL_TENSORS, TIE_SHARE * self.compared)

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} differ ({self.share:.2e}, by {self.steps} steps at the most)"


def compare_layer(grid: Grid, x: Tensor, ours: Tensor, theirs: Any) -> CodeCount:
    """Compare the codes of a layer's output x, as two runtimes compute it."""
    count = CodeCount.of(ours, theirs)
    if not count.differing or grid.scale.numel() != 1:
        return count
    gap = TIE_BAND * grid.scale
    near = grid.codes(x + gap) != grid.codes(x - gap)
    return CodeCount.of(ours, theirs, near.cpu().numpy())


def sum_of(counts: Iterable[CodeCount]) -> CodeCount:
    """Return the count of all together."""
    return sum(counts, CodeCount())


def grid_of(model: nn.Module, name: str) -> Grid:
    """Return a converted model's quantizer.

    Raises:
        TypeError: The model was not converted.
    """
    grid = model.get_submodule(name)
    if not isinstance(grid, Grid):
        raise TypeError(f"verify_onnx: {name!r} is a {type(grid).__name__}; pass what qtoolkit.convert returned.")
    return grid


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return each quantized weight by the dotted name of its quantizer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantModule)]
    return {f"{n}.{q}": weight for n, layer in layers for q, (_, weight) in layer.quantized_weights().items()}


def compare_weight(model: nn.Module, name: str, weight: Tensor, codes: Mapping[str, Sequence[Any]]) -> CodeCount | None:
    """Compare a weight's codes with those of its nodes, or, as the exporter stores equal weights once, of an equal one's."""
    grid = grid_of(model, name)
    ours = as_stored(grid, weight)
    if name in codes:
        return sum_of(CodeCount.of(ours, theirs) for theirs in codes[name])
    equal = (theirs for other, of in codes.items() if _same_grid(grid_of(model, other), grid) for theirs in of)
    return next((CodeCount.of(ours, theirs) for theirs in equal if np.array_equal(ours, theirs)), None)


def twin_of(model: nn.Module, codes: Mapping[str, Sequence[Any]], grid: Grid, x: Tensor, ours: Tensor) -> Any:
    """Return the codes of a node that stands for a call of a quantizer without one of its own, or None.

    The exporter computes equal expressions once, so a quantizer may have fewer nodes than calls: then some node of an equal
    grid has the very same codes, but for rounding ties of what was computed before it.
    """
    equal = (found for name, of in codes.items() if _same_grid(grid_of(model, name), grid) for found in of)
    counts = [(compare_layer(grid, x, ours, found), found) for found in equal if found.shape == tuple(ours.shape)]
    count, nearest = min(counts, key=lambda found: found[0].differing, default=(CodeCount(), None))
    return nearest if count.are_ties() else None


def values_of(grid: Grid, codes: Any, like: Tensor) -> Tensor:
    """Return the values of onnxruntime's codes, in the dtype of a tensor."""
    return grid.values(torch.tensor(codes)).to(like.dtype)


def _same_grid(one: Grid, other: Grid) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    same = (one.spec, one.group) == (other.spec, other.group) and ours.keys() == theirs.keys()
    return same and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def as_stored(grid: Grid, weight: Tensor) -> Tensor:
    """Return a constant's codes in the shape in which the file has them."""
    codes = grid.codes(weight).cpu()
    if grid.group == 1:
        return codes
    # (groups * out, in * k...)
    return codes.reshape(grid.group, -1, *codes.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)
