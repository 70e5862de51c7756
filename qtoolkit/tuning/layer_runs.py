"""LayerRuns: a model that runs on all batches up to one layer after another."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.program import runs_its_graph
from qtoolkit.model_state import removing
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.tuning.running import Batches, ReachedError, part_between
from qtoolkit.tuning.stepwise import Stepwise

MEMORY = 2 * 2**30  # bytes of values that are kept in memory; the others are in temporary files


class LayerRuns(AbstractContextManager["LayerRuns"]):
    """A model that runs on all batches up to one layer after another, in a `with` block.

    A prepared model goes on at the layer that was reached last: all layers together take the time of two runs of the model. Any
    other model has no graph, and runs from its inputs each time. So does a prepared one whose blocks have hooks or wrappers.

    Args:
        model: The model.
        names: The dotted names of the layers, in the order of their first calls.
        data: The batches.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], data: Batches) -> None:
        self.model, self.data = model, data
        self._calls = _calls_of(model, names)
        self._places = {name: place for place, name in enumerate(names)}
        self._stepwise: Stepwise | None = None
        if isinstance(model, QuantizedGraphModule) and self._calls:
            self._stepwise = Stepwise(model, [self._calls[name].all_input_nodes for name in names], data, MEMORY)

    def __exit__(self, *details: Any) -> None:
        if self._stepwise is not None:
            self._stepwise.__exit__(*details)

    def reach(self, name: str) -> None:
        """Run the model as it now is on each batch, to the end of the first call of a layer.

        Args:
            name: The layer; it comes behind that of the last call.
        """
        stop = self.model.get_submodule(name).register_forward_hook(_stop)
        with removing([stop]), torch.no_grad():
            if self._stepwise is None:
                for batch in self.data:
                    _until_reached(self.data.run, self.model, batch, name)
            else:
                self._go_on(self._stepwise, name)

    def _go_on(self, stepwise: Stepwise, name: str) -> None:
        call = self._calls[name]
        layer = part_between(stepwise.gm, call.all_input_nodes, [call], [])
        stepwise.begin(self._places[name], name)
        for index, batch in self.data.each():
            stepwise.run(index, batch, partial(_until_reached, layer))


def _calls_of(model: nn.Module, names: Sequence[str]) -> dict[str, fx.Node]:
    """Return the node that first calls each layer, or a leaf module with it; nothing if one of them is not known."""
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


def _stop(*args: Any) -> None:
    raise ReachedError


def _until_reached(function: Callable[..., Any], *args: Any) -> None:
    with suppress(ReachedError):
        function(*args)
