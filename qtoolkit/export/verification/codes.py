"""Count differences of quantized values between a model and a runtime, and detect rounding ties and ties of maxima."""

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

# The sums of a layer may round differently in two runtimes; a value near a rounding boundary then changes by one step.
TIE_SHARE = 1e-4
TIES_IN_SMALL_TENSORS = 4
# Half the width, in steps, of the band around a rounding boundary in which runtimes may disagree: the rounding error of a sum
# that spans all steps of a grid: SUM_ERROR for the order of a float32 sum, or one unit in the last place of half precision.
LEAST_BAND, LARGEST_BAND = 2**-10, 0.5
# The name of each function of torch.nn.functional that returns positions, with the number of its dimensions.
POOLS = re.compile(r"(?:adaptive_)?max_pool(\d)d_with_indices")
# Allowed relative difference of an output (to its largest value) for identical quantized values: bfloat16 has 8 bits.
OUTPUT_ERROR = 0.02
SUM_ERROR = 2**-18  # of the largest value: 32 units in the last place of a float32 sum


@dataclass(frozen=True)
class CodeCount:
    """Result of a comparison of quantized values."""

    compared: int = 0  # how many codes were compared
    differing: int = 0  # how many of them differ
    steps: int = 0  # the largest difference
    # how many of the differences of one step are within `tie_band` of a rounding boundary. A linear resize of quantized
    # values, for example, places every eighth value there
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
        """Share of the quantized values that differ."""
        return self.differing / max(self.compared, 1)

    @classmethod
    def of(cls, ours: Array, theirs: Array, near: Array | bool = False) -> "CodeCount":
        """Compare two arrays of quantized values; `near` marks values near a rounding boundary."""
        ours, theirs, close = np.broadcast_arrays(ours, theirs, near)
        differing = ours != theirs
        gap = np.abs(ours[differing].astype(np.int64) - theirs[differing].astype(np.int64))
        return cls(differing.size, gap.size, int(gap.max(initial=0)), int(((gap == 1) & close[differing]).sum()))

    def allowed(self, share: float) -> float:
        """Return how many values may differ for an allowed share; at least one, for small tensors."""
        return max(TIES_IN_SMALL_TENSORS, share * self.compared)

    def are_ties(self, share: float = TIE_SHARE, steps: int = 1) -> bool:
        """Return whether rounding ties explain the differences: one step each, and few away from rounding boundaries.

        A small share may differ away from them. int16 values may differ by two of the 65,536 steps in some runtimes.
        """
        return self.steps <= steps and self.differing - self.ties <= self.allowed(share)

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} differ ({self.share:.2e}, by at most {self.steps} steps)"


def sum_of(counts: Iterable[CodeCount]) -> CodeCount:
    """Return the sum of several counts."""
    return sum(counts, CodeCount())


def largest_difference(ours: Sequence[Tensor | Array], theirs: Sequence[Tensor | Array]) -> float:
    """Return the largest absolute difference between tensors or arrays of the same shapes; NaN if one of them contains NaN."""
    with np.errstate(invalid="ignore"):  # of equal infinities, whose difference is zero here
        pairs = ((_array(a), _array(b)) for a, b in zip(ours, theirs, strict=True))
        gaps = [np.where(a == b, 0.0, np.abs(a - b)).max(initial=0) for a, b in pairs]
    return float(np.max(gaps, initial=0.0))


def relative_difference(ours: Tensor, theirs: Array) -> float:
    """Return the largest difference between a tensor and an array, relative to the largest finite value of both."""
    sizes = np.abs(np.concatenate([np.ravel(_array(ours)), np.ravel(_array(theirs))]))
    size, gap = float(sizes[np.isfinite(sizes)].max(initial=0)), largest_difference([ours], [theirs])
    return gap / size if size else gap


def check_outputs(error: float, runtime: str, what: str) -> None:
    """Raise RuntimeError, which begins with `what`, if an output differs by more than rounding for equal quantized values."""
    if error > OUTPUT_ERROR:
        raise RuntimeError(
            f"{what}: an output differs in {runtime} by {error:.1%} of its largest value, although the quantized values before "
            f"it are identical; rounding explains at most {OUTPUT_ERROR:.0%}. The file may belong to another model: export "
            f"this one. If the new file differs too, an op after the last quantizers computes other values in {runtime}: "
            "please report it with the model."
        )


def check_numbers(difference: float, nan: Sequence[str], what: str) -> None:
    """Raise RuntimeError, which begins with `what`, if outputs or quantizers get NaN, which cannot be compared."""
    if nan or np.isnan(difference):
        place = "outputs have NaN" if np.isnan(difference) else f"the quantizers {some(list(map(repr, nan)))} get NaN"
        raise RuntimeError(
            f"{what}: {place}, so nothing can be compared; qtoolkit.stop_on_nonfinite(prepared) names the first quantizer that "
            "gets NaN. Pass inputs for which the model computes finite numbers."
        )
    if np.isinf(difference):
        raise RuntimeError(
            f"{what}: an output is infinite in the runtime or in the model, and finite in the other: an op overflows, such as "
            "the exponential in a logarithm of a sum. Write it in a form that does not, such as torch.nn.functional.softplus."
        )


def _array(value: Tensor | Array) -> NDArray[np.float64]:
    return np.asarray(value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value, np.float64)


@dataclass(frozen=True)
class QuantizerCall:
    """One call of a quantizer in a converted model."""

    grid: Grid  # the quantizer
    codes: Array  # its codes, in the layout of the file
    x: Tensor | None = None  # what it quantizes; None where no difference counts as a tie

    def compare(self, theirs: Array) -> CodeCount:
        """Compare the quantized values with a runtime's."""
        count = CodeCount.of(self.codes, theirs)
        if not count.differing or self.x is None or self.grid.scale.numel() != 1:
            return count
        gap = tie_band(self.grid, self.x.dtype) * self.grid.scale
        near_boundary = codes_in_file(self.grid, self.x + gap) != codes_in_file(self.grid, self.x - gap)
        return CodeCount.of(self.codes, theirs, near_boundary)


def compare_codes(grid: Grid, x: Tensor, theirs: Array) -> CodeCount:
    """Compare a quantizer's quantized values of x with a runtime's."""
    return QuantizerCall(grid, codes_in_file(grid, x), x).compare(theirs)


def rounding_of(dtype: torch.dtype) -> float:
    """Return by how much two sums may differ, relative to the largest value."""
    return max(SUM_ERROR, torch.finfo(dtype).eps if dtype.itemsize < 4 else 0)


def tie_band(grid: Grid, dtype: torch.dtype) -> float:
    """Return the band around a rounding boundary, in steps, in which runtimes may disagree on a value computed in a dtype."""
    error = rounding_of(dtype)
    return min(max(LEAST_BAND, (grid.spec.qmax - grid.spec.qmin) * error), LARGEST_BAND)


def codes_in_file(grid: Grid, x: Tensor) -> Array:
    """Quantize x; return an array in the layout in which the exporters write grouped weights."""
    codes = grid.codes(x.detach()).cpu()
    if grid.group > 1:
        codes = codes.reshape(grid.group, -1, *codes.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)
    return codes.numpy()


class ChosenMaxima(TorchFunctionMode):
    """Makes pools that return positions use the positions of another runtime, if these hold a maximum too.

    Otherwise an unpooling would place values elsewhere, and many quantized values would differ. The positions are given call by
    call, as flat indices into the whole input like ONNX's MaxPool. A pool without positions of its shape keeps its own
    positions.
    """

    def __init__(self, positions: Iterable[Array]) -> None:
        super().__init__()
        self.positions = iter(positions)

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call a function, and replace the positions that it returns."""
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
