"""The verifier: runs a converted model from quantizer to quantizer, and compares with a runtime's quantized values."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtoolkit.errors import with_article
from qtoolkit.export.inputs import grids_of
from qtoolkit.export.rounded_once import rounded
from qtoolkit.export.verification.codes import (
    CodeCount,
    QuantizerCall,
    codes_in_file,
    compare_codes,
    relative_difference,
    rounding_of,
    sum_of,
)
from qtoolkit.model_inputs import tensors_of
from qtoolkit.model_state import RandomState, removing
from qtoolkit.nn import QuantModule
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Array

Hook = Callable[[Grid, tuple[Tensor, ...], Tensor], Tensor | None]
Codes = Mapping[str, Sequence[Array]]  # of each call of quantizers, by their names


@dataclass(frozen=True)
class NodeCodes:
    """The quantized values of a runtime at one node of a quantizer."""

    codes: Array  # the array
    is_constant: bool = False  # whether they do not depend on the inputs of the model


# The nodes of each quantizer by dotted name, in the order of the file.
Nodes = Mapping[str, Sequence[NodeCodes]]


class Drawn(NamedTuple):
    """Quantizers (by name) and outputs (by position) that depend on random numbers, which differ in each run."""

    quantizers: tuple[str, ...] = ()
    outputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Followed:
    """The comparison of a model's quantized values with a runtime's."""

    counts: Mapping[str, CodeCount]  # the comparison at each activation quantizer, in the order of the file
    missing: tuple[str, ...]  # quantizers with a call for which the runtime has no codes
    # the comparison of the layers' weights, and of parameters and buffers that the model quantizes itself
    stored: CodeCount
    outputs: object  # what the model returns
    drawn: Drawn  # what depends on random numbers: these quantizers are not in `counts`

    def output_error(self, outputs: Sequence[Array], places: Set[int]) -> float:
        """Return the largest relative difference from a runtime's outputs at these positions."""
        pairs = enumerate(zip(tensors_of(self.outputs), outputs, strict=True))
        compared = (pair for place, pair in pairs if place in places and place not in self.drawn.outputs)
        return max((relative_difference(*pair) for pair in compared), default=0.0)


@dataclass(frozen=True)
class Pairing:
    """Finds the runtime's quantized values that belong to a call of a quantizer.

    The exporter merges equal expressions, so a quantizer may have fewer nodes than calls, and reorders independent ops. Then
    the node of another call, or of another quantizer with the same grid, has the values: the nearest node counts.
    """

    nodes: Mapping[Grid, Sequence[NodeCodes]]  # the nodes of each quantizer
    calls: Mapping[Grid, int]  # how often each quantizer is called
    up_to_ties: bool  # whether such a node counts only where rounding ties explain the differences

    def node_of(self, call: QuantizerCall, number: int) -> NodeCodes | None:
        """Return the node of a quantizer's call with this number; None if the runtime has none."""
        own = self.nodes.get(call.grid, ())
        node = own[number] if len(own) == self.calls[call.grid] else None
        if node is None or not (node.is_constant or node.codes.shape == call.codes.shape):
            return self.nearest(call)
        if len(own) == 1 or node.is_constant or call.compare(node.codes).are_ties():
            return node
        count, other = _nearest(call, own)  # blocks that run by themselves may call quantizers in another order
        return other if count.are_ties() else node

    def nearest(self, call: QuantizerCall) -> NodeCodes | None:
        """Return the node with the fewest differences among quantizers with the same grid; None if there is none."""
        alike = (node for grid, nodes in self.nodes.items() if same_grid(grid, call.grid) for node in nodes)
        count, node = _nearest(call, alike)
        return node if count.are_ties() or not self.up_to_ties else None


def _nearest(call: QuantizerCall, nodes: Iterable[NodeCodes]) -> tuple[CodeCount, NodeCodes | None]:
    """Return the node with the fewest differences from a call, and the differences; None if no node has its shape."""
    counts = ((call.compare(node.codes), node) for node in nodes if node.codes.shape == call.codes.shape)
    return min(counts, key=lambda found: found[0].differing, default=(CodeCount(), None))


class _Comparison:
    """Collects the results of a comparison, call by call."""

    def __init__(self) -> None:
        self.counts: dict[str, CodeCount] = {}
        self.missing: dict[str, None] = {}
        self.stored = self.found = CodeCount()

    def add(self, name: str, call: QuantizerCall, node: NodeCodes | None, stored: bool = False) -> None:
        """Compare a call of a quantizer with its node, which may be a stored tensor."""
        if node is None:
            if call.codes.size:  # a tensor without elements has no codes, and files leave it out
                self.missing[name] = None
            return
        count = call.compare(node.codes)
        self.found += count
        if stored:
            self.stored += count
        else:  # runtimes may differ by rounding ties in a computed constant, as in a layer
            self.counts[name] = self.counts.get(name, CodeCount()) + count

    def result(self, nodes: Nodes, outputs: object, drawn: Drawn) -> Followed:
        """Return the results. The counts of a quantizer include all its calls."""
        names = [name for name in dict.fromkeys((*nodes, *self.counts)) if name in self.counts]
        counts = {name: self.counts[name] for name in names if name not in {*self.missing, *drawn.quantizers}}
        missing = tuple(name for name in self.missing if name not in drawn.quantizers)
        return Followed(counts, missing, self.stored, outputs, drawn)


class OnnxOrder(TorchFunctionMode):
    """Lets topk, sort and argsort order equal values by their indices, as ONNX's TopK does. PyTorch leaves the order open.

    `given` are the indices of a runtime, call by call. They are taken where they order the values too, up to rounding.
    """

    def __init__(self, given: Iterable[Array | None] = ()) -> None:
        super().__init__()
        self.given = iter(given)

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch."""
        if function not in ORDERS:
            return function(*args, **(kwargs or {}))
        return ORDERS[function](next(self.given, None), *args, **(kwargs or {}))


def _topk(
    given: Array | None, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    if input.dim():
        values, indices = values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
    if given is not None and given.shape == tuple(indices.shape):
        others = torch.as_tensor(given, device=input.device)
        of_others = input.gather(dim, others)
        finite = input.abs().nan_to_num(0, 0, 0) if input.is_floating_point() else torch.zeros(1)
        error = rounding_of(finite.dtype) * float(finite.max())
        if bool(torch.isclose(values, of_others, rtol=0, atol=error).all()):
            values, indices = of_others, others
    return torch.return_types.topk((values, indices))


def _sort(
    given: Array | None, input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True
) -> tuple[Tensor, Tensor]:
    return torch.return_types.sort(_topk(given, input, input.size(dim) if input.dim() else 1, dim, descending))


def _argsort(given: Array | None, input: Tensor, *args: bool, **kwargs: bool) -> Tensor:
    return _sort(given, input, *args, **kwargs)[1]


ORDERS: Mapping[object, Callable[..., object]] = {
    **dict.fromkeys((torch.sort, Tensor.sort), _sort),
    **dict.fromkeys((torch.argsort, Tensor.argsort), _argsort),
    **dict.fromkeys((torch.topk, Tensor.topk), _topk),
}


class Follower:
    """Runs a converted model with these arguments, and compares its quantized values with runtimes'."""

    def __init__(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.names = {grid: name for name, grid in grids_of(model).items() if grid.quantizing}
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantModule)]
        # the quantizer and the tensor of each quantized weight of a layer, by the dotted name of the quantizer
        self.weights = {
            f"{name}.{q}": (grid, weight)
            for name, layer in layers
            for q, (grid, weight) in layer.quantized_weights().items()
            if isinstance(grid, Grid)
        }
        in_layers = {grid for grid, _ in self.weights.values()}
        self.between_layers = [grid for grid in self.names if grid not in in_layers]
        self.activations = {grid for grid in self.between_layers if not grid.of_weight}
        self.calls: Counter[Grid] = Counter()
        self.codes = dict[str, list[Array]]()  # of each activation quantizer that is called, in the order of its calls
        found = dict[str, None]()
        before = RandomState.now()
        self.outputs = self._run(self.names, partial(self._record, found))  # as the model computes by itself
        self.nan = tuple(found)  # the quantizers that get NaN, in the order of their calls: its codes are no values
        self.unreached = tuple(name for grid, name in self.names.items() if not self.calls[grid])  # for these inputs
        self.draws = before != RandomState.now()  # whether the model draws random numbers
        self.drawn = self._drawn(self.codes, self.outputs)  # what depends on them

    def _run(self, grids: Iterable[Grid], hook: Hook, orders: Iterable[Array | None] = ()) -> object:
        with removing([grid.register_forward_hook(hook) for grid in grids]), torch.no_grad(), OnnxOrder(orders):
            return self.model(*self.args, **self.kwargs)

    def _record(self, nan: dict[str, None], grid: Grid, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls[grid] += 1
        if args[0].isnan().any():
            nan[self.names[grid]] = None
        if grid in self.activations:
            self.codes.setdefault(self.names[grid], []).append(_call(grid, args[0], output).codes)

    def _drawn(self, codes: Codes, outputs: object, values: Mapping[str, Sequence[Tensor]] | None = None) -> Drawn:
        """Return what differs in a second run: everything that depends on random numbers.

        `codes` are the quantized values of the first run, by quantizer; `values` are fixed return values of these quantizers in
        both runs; None means computed values.
        """
        if not self.draws:
            return Drawn()
        found: dict[str, None] = {}
        numbers = Counter[str]()

        def compare(grid: Grid, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            """Compare a call with the first run, and return its values."""
            name = self.names[grid]
            if name not in codes:
                return None
            number = numbers[name]
            numbers[name] += 1
            if not np.array_equal(_call(grid, args[0], output).codes, codes[name][number]):
                found[name] = None
            return None if values is None else values[name][number]

        again = tensors_of(self._run(self.names, compare))
        pairs = enumerate(zip(tensors_of(outputs), again, strict=True))
        return Drawn(tuple(found), frozenset(place for place, pair in pairs if not _are_equal(*pair)))

    def unused(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the quantizers among these that do not affect the outputs for these inputs."""
        grids = {name: grid for grid, name in self.names.items() if name in names}
        if not grids or self._is_unchanged_by_nan(grids.values()):
            return tuple(grids)
        return tuple(name for name, grid in grids.items() if self._is_unchanged_by_nan((grid,)))

    def _is_unchanged_by_nan(self, grids: Iterable[Grid]) -> bool:
        """Return whether the outputs stay the same if these quantizers return NaN."""
        try:
            found = tensors_of(self._run(grids, lambda grid, args, output: torch.full_like(output, torch.nan)))
        except Exception:  # NaN took a branch of the user's forward that raises an error
            return False
        known = tensors_of(self.outputs)
        return len(found) == len(known) and all(map(_are_equal, found, known))

    @property
    def on_codes(self) -> tuple[str, ...]:
        """The layers that the model computes in integers."""
        layers = ((name, module) for name, module in self.model.named_modules() if isinstance(module, QuantWeighted))
        return tuple(name for name, layer in layers if layer.has_active_kernel)

    def end_to_end(self, nodes: Nodes) -> Followed:
        """Compare activations with a runtime's, each as computed by the model on its own. Differences never count as ties."""
        pairing, comparison = self._pairing(nodes, up_to_ties=False), _Comparison()
        grids = {name: grid for grid, name in self.names.items()}
        for name, calls in self.codes.items():
            for number, codes in enumerate(calls if name not in self.drawn.quantizers else ()):
                call = QuantizerCall(grids[name], codes)
                comparison.add(name, call, pairing.node_of(call, number))
        return self._without_unused(comparison.result(nodes, self.outputs, Drawn()), nodes)

    def layer_by_layer(
        self, nodes: Nodes, complete: bool = False, progress: bool = False, orders: Iterable[Array | None] = ()
    ) -> Followed:
        """Compare quantized values layer by layer, with the runtime's values as inputs, so that no difference spreads.

        `orders` are the indices of its TopK nodes, in their order. With `complete`, the runtime's values cover all nodes,
        including weights and other constants, which are then compared too. A call without its own node is matched with a node
        that differs only by rounding ties.
        """
        pairing, comparison, numbers = self._pairing(nodes, up_to_ties=complete), _Comparison(), Counter[Grid]()
        first_codes, first_values = defaultdict[str, list[Array]](list), defaultdict[str, list[Tensor]](list)
        grids = self.between_layers if complete else self.activations
        tensors = (*self.model.parameters(), *self.model.buffers())
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

        def compare(grid: Grid, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            """Compare a call with its node, and return the node's values as inputs of the next layer."""
            call = _call(grid, args[0], output)
            node = pairing.node_of(call, numbers[grid])
            numbers[grid] += 1
            is_stored = node is not None and node.is_constant and args[0].untyped_storage().data_ptr() in storages
            comparison.add(self.names[grid], call, node, is_stored)
            found = comparison.found
            note(bar, f"{found.differing:,} of {found.compared:,} values differ")
            bar.update()
            values = output  # a constant keeps the model's values, since its layout in the file may differ
            if node is not None and not node.is_constant:
                values = rounded(grid.values(torch.tensor(node.codes, device=output.device)), output.dtype)
            if self.draws:
                first_codes[self.names[grid]].append(call.codes)
                first_values[self.names[grid]].append(values)
            return values

        with progress_bar("verify", "quantizers", progress, total=sum(self.calls[grid] for grid in grids)) as bar:
            outputs = self._run(grids, compare, orders)
        if complete:
            comparison.stored += sum_of(self.compare_weights(nodes).values())
            for name, (grid, weight) in self.weights.items():
                if name not in nodes and self.calls[grid]:
                    call = _call(grid, weight, weight)
                    comparison.add(name, call, pairing.nearest(call), stored=True)
        return self._without_unused(
            comparison.result(nodes, outputs, self._drawn(first_codes, outputs, first_values)), nodes
        )

    def _without_unused(self, found: Followed, nodes: Nodes) -> Followed:
        """Drop quantizers that no output depends on, and that files omit: others may have the same grid by chance."""
        borrowed = [name for name, count in found.counts.items() if name not in nodes and not count.are_ties()]
        unused = self.unused(borrowed)
        counts = {name: count for name, count in found.counts.items() if name not in unused}
        return replace(found, counts=counts, missing=(*found.missing, *unused))

    def compare_weights(self, nodes: Nodes) -> dict[str, CodeCount]:
        """Compare the quantized weights of layers with their own nodes."""
        return {
            name: sum_of(compare_codes(grid, weight, node.codes) for node in nodes[name])
            for name, (grid, weight) in self.weights.items()
            if name in nodes
        }

    def _pairing(self, nodes: Nodes, up_to_ties: bool) -> Pairing:
        of_grids = {grid_named(self.model, name): of_name for name, of_name in nodes.items()}
        return Pairing(of_grids, self.calls, up_to_ties)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, with NaN at the same positions."""
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _call(grid: Grid, x: Tensor, output: Tensor) -> QuantizerCall:
    """Return a call; a grid that rounds like its runtime may differ from `Grid.codes` of its input at ties."""
    return QuantizerCall(grid, codes_in_file(grid, x if grid.quantizes_as is None else output), x)


def grid_named(model: nn.Module, name: str) -> Grid:
    """Return the quantizer of a converted model; raise TypeError if the model was not converted."""
    grid = model.get_submodule(name)
    if not isinstance(grid, Grid):
        raise TypeError(f"verify: {name!r} is {with_article(type(grid))}; pass what qtoolkit.convert returned.")
    return grid


def same_grid(one: Grid, other: Grid) -> bool:
    """Return whether two quantizers have the same grid."""
    ours, theirs = one.state_dict(), other.state_dict()
    same = (one.spec, one.group) == (other.spec, other.group) and ours.keys() == theirs.keys()
    return same and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def check_names(quantizers: Sequence[str], model: nn.Module, what: str) -> None:
    """Raise ValueError, which begins with `what`, if the file has a quantizer that the model lacks."""
    known = {name for name, _ in model.named_modules()}
    others = [name for name in quantizers if name not in known]
    if others:
        raise ValueError(
            f"{what}: the file has a quantizer {others[0]!r}, and the model does not ({len(others)} of {len(quantizers)}): the "
            "file belongs to another model; export this one."
        )


def by_quantizer(nodes: Iterable[tuple[str, NodeCodes]]) -> dict[str, list[NodeCodes]]:
    """Return the nodes of each quantizer by name."""
    found: dict[str, list[NodeCodes]] = defaultdict(list)
    for name, node in nodes:
        found[name].append(node)
    return found


def in_shapes_of_calls(codes: Iterable[tuple[str, Array]], follower: Follower) -> dict[str, list[NodeCodes]]:
    """Return quantized values in the model's shapes: in files, a mean over an image keeps the reduced dimensions."""
    shapes = {name: {call.size: call.shape for call in calls} for name, calls in follower.codes.items()}
    return by_quantizer(
        (name, NodeCodes(array.reshape(shapes.get(name, {}).get(array.size, array.shape)))) for name, array in codes
    )
