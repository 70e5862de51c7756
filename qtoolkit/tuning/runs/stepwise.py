"""Stepwise, LayerRuns: run a model on all batches section by section, and continue from cached values."""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import parameters_in
from qtoolkit.graph.program import runs_its_graph
from qtoolkit.graph.program.division import free_nodes
from qtoolkit.model_state import device_of, removing
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.tuning.runs.batches import Batches, ReachedError, arguments_part, part_between
from qtoolkit.tuning.runs.cache import BatchCache

MEMORY = 2 * 2**30  # bytes of values that LayerRuns keeps in memory; the others are in temporary files


Values = Sequence[Any]  # of nodes of a graph


class Stepwise(ExitStack):
    """A graph that computes goals (values of some nodes) one after another on all batches, and no node twice.

    Between two goals it keeps, for each batch, only the values that later goals depend on: up to `limit` bytes in memory, the
    rest in temporary files. If the goals follow each other in the graph, all goals together take the time of one run of the
    model. Computed values stay the same if the model changes later. Nodes that no goal needs do not run.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> gm = qt.prepare(model.eval(), backend="tensorrt")
        >>> layers = [node for node in gm.graph.nodes if str(node.target) in ("0", "2")]
        >>> data, calls = Batches([torch.ones(1, 2)], None, "example"), []
        >>> _ = gm.get_submodule("0").register_forward_hook(lambda *args: calls.append("0"))
        >>> qt.disable_quantization(gm).apply()
        >>> with Stepwise(gm, [[layer] for layer in layers], data, 1e6) as stepwise:
        ...     for place in range(2):
        ...         stepwise.begin(place)
        ...         for index, batch in data.each():
        ...             (y,) = stepwise.run(index, batch)
        >>> torch.equal(y, gm(torch.ones(1, 2))), calls  # the second call is by gm
        (True, ['0', '0'])
    """

    def __init__(
        self, gm: QuantizedGraphModule, goals: Sequence[Sequence[fx.Node]], data: Batches, limit: float
    ) -> None:
        super().__init__()
        self.gm, self.goals, self.data = gm, goals, data
        constant = parameters_in(gm.graph)
        # What each stretch computes for itself.
        self._free = free_nodes(gm) | constant
        # Their inputs may be kept for other nodes: a node can run before an earlier node of the graph.
        self._in_place = {node for node in gm.graph.nodes if changed_by(node, gm) not in (None, *constant)}
        self._order = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._arguments = arguments_part(gm)
        self._cache: BatchCache[Values] = self.enter_context(BatchCache(limit, device_of(gm) or torch.device("cpu")))
        # The nodes with cached values for each batch, before the current goal and after it.
        self._before, self._after = list[fx.Node](), [node for node in gm.graph.nodes if node.op == "placeholder"]

    def begin(self, place: int, up_to: str = "") -> None:
        """Continue to a goal after the last one, with the current model. Then call `run` once for each batch."""
        goal, self._up_to, self._before, self._filled = self.goals[place], up_to, self._after, len(self._cache) > 0
        sources, nodes = self._towards(goal, self._before)
        known = {*self._before, *nodes} - self._free
        self._after, _ = self._towards(itertools.chain(*self.goals[place + 1 :]), known)
        self._sources, self._computed = sources, [node for node in self._after if node not in self._before]
        self._part = part_between(self.gm, sources, nodes, self._computed, goal, self._in_place)

    def run(self, index: int, batch: object, then: Callable[..., None] | None = None) -> Values:
        """Compute the goal for a batch from `Batches.each`; return copies of the values.

        `then` is called with the values; with `forward`, it is called in place of the model.
        """
        if self.data.forward is not None:
            return self.data.run_inside(self.gm, batch, partial(self._inside, index, then), self._up_to)
        with self.data.explaining(self.gm, self._up_to):
            known = self._cache[index] if self._filled else self.data.run(self._arguments, batch, self._up_to)
            return self._step(index, then, known)

    def _inside(self, index: int, then: Callable[..., None] | None, *args: object, **kwargs: object) -> Values:
        return self._step(index, then, self._cache[index] if self._filled else self._arguments(*args, **kwargs))

    def _step(self, index: int, then: Callable[..., None] | None, values: Values) -> Values:
        known = dict(zip(self._before, values, strict=True))
        found = self._part(*(known[node] for node in self._sources))
        known.update(zip(self._computed, found, strict=False))
        kept = [known[node] for node in self._after]
        if self._filled:
            self._cache[index] = kept
        else:
            self._cache.append(kept)
        goal: Values = found[len(self._computed) :]
        if then is not None:
            then(*goal)
        return goal

    def _towards(self, wanted: Iterable[fx.Node], known: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the known nodes from which the goals can be computed, and the nodes to compute; both in order."""
        waiting, sources, nodes = list(wanted), set[fx.Node](), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in known:
                sources.add(node)
            elif node not in nodes:
                nodes.add(node)
                waiting += node.all_input_nodes
        return sorted(sources, key=self._order.__getitem__), sorted(nodes, key=self._order.__getitem__)


class LayerRuns(ExitStack):
    """Runs a model on all batches up to one layer after another, in the order of their first calls, in a `with` block.

    A prepared model continues at the last layer: all layers together take the time of two runs of the model. A model without a
    graph, or a prepared model whose blocks have hooks or wrappers, runs from its inputs each time.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], data: Batches) -> None:
        super().__init__()
        self.model, self.data = model, data
        self._calls = _calls_of(model, names)
        self._places = {name: place for place, name in enumerate(names)}
        self._stepwise: Stepwise | None = None
        if isinstance(model, QuantizedGraphModule) and self._calls:
            goals = [self._calls[name].all_input_nodes for name in names]
            self._stepwise = self.enter_context(Stepwise(model, goals, data, MEMORY))

    def reach(self, name: str) -> None:
        """Run the current model on each batch, to the end of the first call of a layer after the last one."""
        stop = self.model.get_submodule(name).register_forward_hook(_stop)
        with removing([stop]), torch.no_grad():
            if self._stepwise is None:
                for batch in self.data:
                    _until_reached(self.data.run, self.model, batch, name)
            else:
                self._go_on(self._stepwise, name)

    def whole(self) -> None:
        """Run the whole current model on each batch."""
        with torch.no_grad():
            for batch in self.data:
                self.data.run(self.model, batch)

    def _go_on(self, stepwise: Stepwise, name: str) -> None:
        call = self._calls[name]
        layer = part_between(stepwise.gm, call.all_input_nodes, [call], [])
        stepwise.begin(self._places[name], name)
        for index, batch in self.data.each():
            stepwise.run(index, batch, partial(_until_reached, layer))


def _calls_of(model: nn.Module, names: Sequence[str]) -> dict[str, fx.Node]:
    """Return the node that first calls each layer, or a leaf module with it; empty if one of them is unknown."""
    if not isinstance(model, QuantizedGraphModule) or not runs_its_graph(model):
        return {}
    nodes: dict[nn.Module, list[fx.Node]] = {}
    for node in (node for node in model.graph.nodes if node.op == "call_module"):
        for module in module_of(node).modules():
            nodes.setdefault(module, []).append(node)
    found: dict[str, fx.Node] = {}
    for name in names:
        layer = model.get_submodule(name)
        calls = nodes.get(layer, [])
        if not calls or (len(calls) > 1 and module_of(calls[0]) is not layer):  # one call of several reaches it
            return {}
        found[name] = calls[0]
    return found


def _stop(*_: object) -> NoReturn:
    raise ReachedError


def _until_reached(function: Callable[..., object], *args: object) -> None:
    with suppress(ReachedError):
        function(*args)
