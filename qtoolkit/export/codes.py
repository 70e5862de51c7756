"""Comparison of the integer codes of a converted model with those that onnxruntime computes from the exported file."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qtoolkit.errors import with_article
from qtoolkit.export.positions import SUM_ERROR, ChosenMaxima
from qtoolkit.model_state import removing
from qtoolkit.nn import QuantModule
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.frozen import Grid

# The sums of a layer may round differently in two runtimes; a value near a rounding boundary then changes by one code.
TIE_SHARE = 1e-4
TIES_IN_SMALL_TENSORS = 4
# Half the width, in steps, of the band around a rounding boundary in which runtimes may disagree: the rounding error of a sum
# that spans all steps of a grid: SUM_ERROR for the order of a float32 sum, or one unit in the last place of half precision.
LEAST_BAND, LARGEST_BAND = 2**-10, 0.5


@dataclass(frozen=True)
class CodeCount:
    """Result of a comparison of codes.

    Attributes:
        compared: How many codes were compared.
        differing: How many of them differ.
        steps: The largest difference.
        ties: How many of those that differ by one step belong to values within `tie_band` of a rounding boundary. A linear
            resize of quantized values, for example, places every eighth value there.
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
        """Compare two arrays of codes; `near` marks the values that are near a rounding boundary."""
        gap = np.abs(np.asarray(ours, np.int64) - np.asarray(theirs, np.int64))
        return cls(gap.size, int((gap > 0).sum()), int(gap.max(initial=0)), int(((gap == 1) & near).sum()))

    def are_ties(self) -> bool:
        """Return whether rounding ties explain the differences: one step each, and few away from rounding boundaries."""
        apart = self.differing - self.ties
        return self.steps <= 1 and apart <= max(TIES_IN_SMALL_TENSORS, TIE_SHARE * self.compared)

    def __str__(self) -> str:
        return f"{self.differing} of {self.compared} differ ({self.share:.2e}, by at most {self.steps} steps)"


def sum_of(counts: Iterable[CodeCount]) -> CodeCount:
    """Return the sum of several counts."""
    return sum(counts, CodeCount())


def largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest absolute difference between tensors or arrays of the same shapes; NaN where one of them has NaN."""
    gaps = [_gap(np.float64(_array(a)), np.float64(_array(b))) for a, b in zip(ours, theirs, strict=True)]
    return float(np.max(gaps, initial=0.0))


def _gap(one: Any, other: Any) -> Any:
    with np.errstate(invalid="ignore"):  # of equal infinities, whose difference is zero here
        return np.where(one == other, 0.0, np.abs(one - other)).max(initial=0)


def relative_difference(ours: Tensor, theirs: Any) -> float:
    """Return the largest difference between a tensor and an array, as a share of the largest finite value of both."""
    sizes = np.abs(np.concatenate([np.ravel(_array(ours)), np.ravel(_array(theirs))]))
    size, gap = float(sizes[np.isfinite(sizes)].max(initial=0)), largest_difference([ours], [theirs])
    return gap / size if size else gap


def check_difference(difference: float, what: str) -> None:
    """Raise RuntimeError, which begins with `what`, where outputs cannot be compared because they have NaN."""
    if np.isnan(difference):
        raise RuntimeError(
            f"{what}: outputs have NaN, for which nothing can be compared; qtoolkit.stop_on_nonfinite(prepared) names the "
            f"first quantizer that gets NaN. Pass inputs for which the model returns numbers."
        )


def _array(value: Any) -> Any:
    return value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class NodeCodes:
    """The codes that onnxruntime computes at one of a quantizer's nodes.

    Attributes:
        codes: The array.
        is_constant: Whether they do not depend on the inputs of the model.
    """

    codes: Any
    is_constant: bool


def compare_codes(grid: Grid, x: Tensor, theirs: Any) -> CodeCount:
    """Compare a quantizer's codes of x with onnxruntime's."""
    ours = _codes_in_file(grid, x)
    count = CodeCount.of(ours, theirs)
    if not count.differing or grid.scale.numel() != 1:
        return count
    return CodeCount.of(ours, theirs, near_boundary(grid, x))


def near_boundary(grid: Grid, x: Tensor) -> Any:
    """Return which elements of x are so near to a rounding boundary of a grid of one scale that runtimes may disagree."""
    gap = tie_band(grid, x.dtype) * grid.scale
    return (_codes_in_file(grid, x + gap) != _codes_in_file(grid, x - gap)).numpy()


def tie_band(grid: Grid, dtype: torch.dtype) -> float:
    """Return how far from a rounding boundary, in steps, two runtimes may disagree on a value that was computed in a dtype."""
    error = max(SUM_ERROR, torch.finfo(dtype).eps if dtype.itemsize < 4 else 0)
    return min(max(LEAST_BAND, (grid.spec.qmax - grid.spec.qmin) * error), LARGEST_BAND)


def _codes_in_file(grid: Grid, x: Tensor) -> Tensor:
    """Return the codes of x in the layout of the file: as `qtoolkit.export.translation` writes grouped weights."""
    codes = grid.codes(x).cpu()
    if grid.group == 1:
        return codes
    return codes.reshape(grid.group, -1, *codes.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)


def nearest_node(nodes: Iterable[NodeCodes], grid: Grid, x: Tensor) -> NodeCodes | None:
    """Return the node whose codes equal a quantizer's codes of x up to rounding ties, or None.

    The exporter computes equal expressions once, so a quantizer may have fewer nodes than calls. A node of another
    quantizer with the same scale then has its codes.
    """
    shape = tuple(_codes_in_file(grid, x).shape)
    counts = [(compare_codes(grid, x, node.codes), node) for node in nodes if node.codes.shape == shape]
    count, nearest = min(counts, key=lambda found: found[0].differing, default=(CodeCount(), None))
    return nearest if count.are_ties() else None


class CodeComparison:
    """Compares the codes of a converted model with onnxruntime's, layer by layer.

    After each activation quantizer the model continues with onnxruntime's codes, so that differences do not accumulate.

    Args:
        converted: The model.
        nodes: The nodes of each quantizer by its dotted name, in the order of the file.
        positions: The positions that onnxruntime's max pools return, where they are used, in the order of the file.
        progress: Show a progress bar.

    Attributes:
        grids: Each quantizer that has nodes, by its dotted name.
        weights: Quantizer and tensor of each quantized weight of a layer, by the dotted name of the quantizer.
        counts: Comparison of each activation quantizer.
        stored: Comparison of the layers' weights, and of parameters and buffers that the model's own code quantizes.
        missing: Quantizers that are executed but have no node, once for each call.
        unreached: Quantizers that are not executed for the inputs.
        outputs: What the model returns where it continues with onnxruntime's codes.

    Raises:
        TypeError: The model was not converted.
    """

    outputs: Any = None

    def __init__(
        self,
        converted: nn.Module,
        nodes: Mapping[str, Sequence[NodeCodes]],
        positions: Sequence[Any] = (),
        progress: bool = True,
    ) -> None:
        self.converted, self.nodes, self.positions = converted, nodes, positions
        grids = {module: name for name, module in converted.named_modules() if isinstance(module, Grid)}
        self.names = {grid: name for grid, name in grids.items() if grid.quantizing}
        self.grids = {name: grid_named(converted, name) for name in nodes}
        self.weights = layer_weights(converted)
        self.storages = {t.untyped_storage().data_ptr() for t in (*converted.parameters(), *converted.buffers())}
        self.waiting: dict[Grid, Iterator[NodeCodes]] = {}
        self.counts: dict[str, CodeCount] = {}
        self.stored = CodeCount()
        self.found = CodeCount()  # by all calls so far, for the bar
        self.bar = progress_bar("verify", "quantizers", progress)
        self.missing: list[str] = []
        self.unreached: tuple[str, ...] = ()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model twice, to count the calls and to compare; return the outputs of the first run."""
        calls: Counter[nn.Module] = Counter()
        with forward_hooks(self.names, lambda grid, *_: calls.update([grid])):
            outputs = self.converted(*args, **kwargs)
        self.unreached = tuple(name for grid, name in self.names.items() if not calls[grid])
        counted = {self.grids[name]: nodes for name, nodes in self.nodes.items()}
        self.waiting = {grid: iter(nodes) for grid, nodes in counted.items() if len(nodes) == calls[grid]}
        in_layers = {grid for grid, _ in self.weights.values()}
        between_layers = [grid for grid in self.names if grid not in in_layers]
        self.bar.total = sum(calls[grid] for grid in between_layers)
        with (
            self.bar,
            forward_hooks(between_layers, self._compare_call),
            ChosenMaxima(self.positions),
        ):
            self.outputs = self.converted(*args, **kwargs)
        for name, (grid, weight) in self.weights.items():
            if name in self.nodes or calls[grid]:
                self._compare_weight(name, grid, weight)
        return outputs

    def _compare_call(self, grid: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        x, name = args[0], self.names[grid]
        node = next(self.waiting[grid]) if grid in self.waiting else nearest_node(self._nodes_like(grid), grid, x)
        if node is None:
            self.missing.append(name)
            return output
        count = compare_codes(grid, x, node.codes)
        if node.is_constant and x.untyped_storage().data_ptr() in self.storages:
            self.stored += count
        else:  # runtimes may differ by rounding ties in a computed constant, as in a layer
            self.counts[name] = self.counts.get(name, CodeCount()) + count
        self.found += count
        note(self.bar, f"{self.found.differing:,} of {self.found.compared:,} codes differ")
        self.bar.update()
        # A constant keeps the model's values, since its layout in the file may differ.
        return output if node.is_constant else grid.values(torch.tensor(node.codes)).to(x.dtype)

    def _compare_weight(self, name: str, grid: Grid, weight: Tensor) -> None:
        nearest = None if name in self.nodes else nearest_node(self._nodes_like(grid), grid, weight)
        nodes = self.nodes.get(name, () if nearest is None else (nearest,))
        self.stored += sum_of(compare_codes(grid, weight, node.codes) for node in nodes)
        if not nodes:
            self.missing.append(name)

    def _nodes_like(self, grid: Grid) -> Iterator[NodeCodes]:
        return (node for name, nodes in self.nodes.items() if same_grid(self.grids[name], grid) for node in nodes)


def grid_named(model: nn.Module, name: str) -> Grid:
    """Return the quantizer of a converted model; raise TypeError if the model was not converted."""
    grid = model.get_submodule(name)
    if not isinstance(grid, Grid):
        raise TypeError(f"verify: {name!r} is {with_article(type(grid))}; pass what qtoolkit.convert returned.")
    return grid


def layer_weights(model: nn.Module) -> dict[str, tuple[Any, Tensor]]:
    """Return the quantizer and the tensor of each quantized weight of a layer, by the dotted name of the quantizer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantModule)]
    return {f"{n}.{q}": quantized for n, layer in layers for q, quantized in layer.quantized_weights().items()}


def same_grid(one: Grid, other: Grid) -> bool:
    """Return whether two quantizers have the same codes for the same values."""
    ours, theirs = one.state_dict(), other.state_dict()
    same = (one.spec, one.group) == (other.spec, other.group) and ours.keys() == theirs.keys()
    return same and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@contextmanager
def forward_hooks(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Register a forward hook on modules for the duration of a `with` block."""
    handles = [module.register_forward_hook(hook) for module in modules]
    with removing(handles):
        yield
