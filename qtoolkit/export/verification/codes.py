"""How codes and values of a model and a runtime differ, and which differences are rounding ties; positions of maxima too."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qtoolkit.errors import some
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Array

# The sums of a layer may round differently in two runtimes; a value near a rounding boundary then changes by one code.
TIE_SHARE = 1e-4
TIES_IN_SMALL_TENSORS = 4
# Half the width, in steps, of the band around a rounding boundary in which runtimes may disagree: the rounding error of a sum
# that spans all steps of a grid: SUM_ERROR for the order of a float32 sum, or one unit in the last place of half precision.
LEAST_BAND, LARGEST_BAND = 2**-10, 0.5
# The name of each function of torch.nn.functional that returns positions, with the number of its dimensions.
POOLS = re.compile(r"(?:adaptive_)?max_pool(\d)d_with_indices")
# Largest share of an output's largest value by which it may differ where all codes are the same: bfloat16 has 8 bits.
OUTPUT_ERROR = 0.02
SUM_ERROR = 2**-18  # of the largest value: 32 units in the last place of a float32 sum


@dataclass(frozen=True)
class CodeCount:
    """Result of a comparison of codes."""

    compared: int = 0  # how many codes were compared
    differing: int = 0  # how many of them differ
    steps: int = 0  # the largest difference
    # how many of those that differ by one step belong to values within `tie_band` of a rounding boundary. A linear resize of
    # quantized values, for example, places every eighth value there
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
    def of(cls, ours: Array, theirs: Array, near: Array | bool = False) -> "CodeCount":
        """Compare two arrays of codes; `near` marks the values that are near a rounding boundary."""
        gap = np.abs(np.asarray(ours, np.int64) - np.asarray(theirs, np.int64))
        return cls(gap.size, int((gap > 0).sum()), int(gap.max(initial=0)), int(((gap == 1) & near).sum()))

    def allowed(self, share: float) -> float:
        """Return how many codes may differ where a share of them may, of which small tensors have hardly one."""
        return max(TIES_IN_SMALL_TENSORS, share * self.compared)

    def are_ties(self, share: float = TIE_SHARE, steps: int = 1) -> bool:
        """Return whether rounding ties explain the differences: one step each, and few away from rounding boundaries.

        A share of the codes may differ there. Codes of int16 may have two steps of the 65,536, in some runtimes.
        """
        return self.steps <= steps and self.differing - self.ties <= self.allowed(share)

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} differ ({self.share:.2e}, by at most {self.steps} steps)"


def sum_of(counts: Iterable[CodeCount]) -> CodeCount:
    """Return the sum of several counts."""
    return sum(counts, CodeCount())


def largest_difference(ours: Sequence[Tensor | Array], theirs: Sequence[Tensor | Array]) -> float:
    """Return the largest absolute difference between tensors or arrays of the same shapes; NaN where one of them has NaN."""
    with np.errstate(invalid="ignore"):  # of equal infinities, whose difference is zero here
        pairs = ((_array(a), _array(b)) for a, b in zip(ours, theirs, strict=True))
        gaps = [np.where(a == b, 0.0, np.abs(a - b)).max(initial=0) for a, b in pairs]
    return float(np.max(gaps, initial=0.0))


def relative_difference(ours: Tensor, theirs: Array) -> float:
    """Return the largest difference between a tensor and an array, as a share of the largest finite value of both."""
    sizes = np.abs(np.concatenate([np.ravel(_array(ours)), np.ravel(_array(theirs))]))
    size, gap = float(sizes[np.isfinite(sizes)].max(initial=0)), largest_difference([ours], [theirs])
    return gap / size if size else gap


def check_outputs(error: float, runtime: str, what: str) -> None:
    """Raise RuntimeError, which begins with `what`, where an output differs by more than rounding behind the same codes."""
    if error > OUTPUT_ERROR:
        raise RuntimeError(
            f"{what}: an output differs in {runtime} by {error:.1%} of its largest value, where its inputs have the same "
            f"codes; at most {OUTPUT_ERROR:.0%} is rounding. The file may be of another model: export this one. If it differs "
            f"too, a layer behind the last quantizers computes something else: report it with the model."
        )


def check_numbers(difference: float, nan: Sequence[str], what: str) -> None:
    """Raise RuntimeError, which begins with `what`, where outputs or quantizers have NaN, whose codes say nothing."""
    if nan or np.isnan(difference):
        place = "outputs have NaN" if np.isnan(difference) else f"the quantizers {some(list(map(repr, nan)))} get NaN"
        raise RuntimeError(
            f"{what}: {place}, for which nothing can be compared; qtoolkit.stop_on_nonfinite(prepared) names the "
            f"first quantizer that gets NaN. Pass inputs for which the model computes numbers."
        )


def _array(value: Tensor | Array) -> NDArray[np.float64]:
    return np.asarray(value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value, np.float64)


@dataclass(frozen=True)
class QuantizerCall:
    """What a quantizer of a converted model computes in one call."""

    grid: Grid  # the quantizer
    codes: Array  # its codes, in the layout of the file
    x: Tensor | None = None  # what it quantizes; None where no difference counts as a tie

    def compare(self, theirs: Array) -> CodeCount:
        """Compare the codes with a runtime's."""
        count = CodeCount.of(self.codes, theirs)
        if not count.differing or self.x is None or self.grid.scale.numel() != 1:
            return count
        gap = tie_band(self.grid, self.x.dtype) * self.grid.scale
        near_boundary = codes_in_file(self.grid, self.x + gap) != codes_in_file(self.grid, self.x - gap)
        return CodeCount.of(self.codes, theirs, near_boundary)


def compare_codes(grid: Grid, x: Tensor, theirs: Array) -> CodeCount:
    """Compare a quantizer's codes of x with a runtime's."""
    return QuantizerCall(grid, codes_in_file(grid, x), x).compare(theirs)


def tie_band(grid: Grid, dtype: torch.dtype) -> float:
    """Return how far from a rounding boundary, in steps, two runtimes may disagree on a value that was computed in a dtype."""
    error = max(SUM_ERROR, torch.finfo(dtype).eps if dtype.itemsize < 4 else 0)
    return min(max(LEAST_BAND, (grid.spec.qmax - grid.spec.qmin) * error), LARGEST_BAND)


def codes_in_file(grid: Grid, x: Tensor) -> Array:
    """Return the codes of x as an array in the layout of the file, in which the exporters write grouped weights."""
    codes = grid.codes(x.detach()).cpu()
    if grid.group > 1:
        codes = codes.reshape(grid.group, -1, *codes.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)
    return codes.numpy()


class ChosenMaxima(TorchFunctionMode):
    """Lets pools that return positions return those that another runtime chose, where these hold a maximum too.

    Otherwise an unpooling would place a value elsewhere, and all its codes there would differ. The positions come call
    by call, counted through the whole input as ONNX's MaxPool does. A pool whose turn finds none of its shape
    keeps its own.
    """

    def __init__(self, positions: Iterable[Array]) -> None:
        super().__init__()
        self.positions = iter(positions)

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call a function, and choose the positions that it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        pool = POOLS.fullmatch(getattr(func, "__name__", ""))
        given = None if pool is None else next(self.positions, None)
        if pool is None or given is None or given.size != result[1].numel():
            return result
        maxima, own = result
        x = args[0] if args else kwargs["input"]
        return maxima, _chosen(x, maxima, own, torch.as_tensor(given, device=x.device), int(pool[1]))


def _chosen(x: Tensor, maxima: Tensor, own: Tensor, given: Tensor, dims: int) -> Tensor:
    given = given.reshape(own.shape) % math.prod(x.shape[-dims:])  # torch counts within a plane
    values = x.flatten(-dims).gather(-1, given.flatten(-dims)).reshape(own.shape)
    return torch.where((maxima - values).abs() <= SUM_ERROR * x.abs().max(), given, own)
