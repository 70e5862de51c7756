"""Running parts of a model on batches: up to a node of its graph, or up to a layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.eager.record import check_links
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import clone_tensors, run_batch
from qtoolkit.model_state import evaluating, unchanged_on_error
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.quantizers.tensor_quantizer import quantizers_of

Forward = Callable[[nn.Module, Any], Any]


class ReachedError(Exception):
    """A part of a model has run as far as it was wanted."""


class Batches:
    """The batches that the user gave, which are read several times.

    Args:
        batches: Any iterable of batches; an iterator, which can be read only once, is stored as a list.
        forward: forward(model, batch), or None for batches that the model takes.
        what: The public function, for errors.

    Raises:
        TypeError: It is no iterable of batches, or forward is no function.
    """

    def __init__(self, batches: Iterable[Any], forward: Forward | None, what: str) -> None:
        if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
            raise TypeError(
                f"{what}: batches must be an iterable of batches, such as a list, got {type(batches).__name__}."
            )
        if forward is not None and not callable(forward):
            raise TypeError(f"{what}: forward must be a function of a model and a batch, or None, got {forward!r}.")
        self.batches = list(batches) if isinstance(batches, Iterator) else batches
        self.forward, self.what = forward, what

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for count, batch in enumerate(self.batches, 1):  # noqa: B007
            yield batch
        if not count:
            raise ValueError(f"{self.what}: batches must hold at least one batch, got none.")

    def run(self, model: nn.Module, batch: Any, up_to: str = "") -> Any:
        """Run a model, or its part up to some layer, on a batch.

        Raises:
            ReachedError: A hook of the model says that it has run far enough.
            TypeError: The batch does not match the signature of the model's forward.
            ValueError: The model cannot run on the batch.
            RuntimeError: A quantizer has no range yet.
        """
        try:
            return run_batch(model, batch, self.what) if self.forward is None else self.forward(model, batch)
        except RuntimeError as error:
            without = any(q.quantizing and not q.ready for q in quantizers_of(model).values())
            if type(error) is not RuntimeError or without:  # no memory is left, or a quantizer names itself
                raise
            where = f" up to {up_to!r}" if up_to else ""
            raise ValueError(
                f"{self.what}: the model does not run on a batch{where}: {error}. Pass the batches on which "
                f"qtoolkit.calibrate runs."
            ) from error


class Part(nn.Module):
    """The part of a graph that computes some nodes.

    Args:
        gm: The model. Its submodules and parameters are those of the part.
        wanted: The nodes.
    """

    def __init__(self, gm: QuantizedGraphModule, wanted: Sequence[fx.Node]) -> None:
        super().__init__()
        needed, waiting = set[fx.Node](), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        graph, written = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.set_codegen(gm.graph._codegen)
        kept = dict[fx.Node, fx.Node]()
        for node in gm.graph.nodes:
            if node in needed or node.op == "placeholder":
                written[node] = graph.node_copy(node, written.__getitem__)
            if node in wanted:  # a later op may change it in place
                kept[node] = graph.call_function(clone_tensors, (written[node],))
        graph.output(tuple(kept[node] for node in wanted))
        self.inner = fx.GraphModule(gm, graph, type(gm).__name__)
        self.values: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the nodes, and stop the function that called the model."""
        self.values = self.inner(*args, **kwargs)
        raise ReachedError

    def of(self, batches: Batches, batch: Any, up_to: str) -> tuple[Any, ...]:
        """Return the values of the nodes for a batch."""
        if batches.forward is None:
            values: tuple[Any, ...] = batches.run(self.inner, batch, up_to)
            return values
        try:
            batches.run(self, batch, up_to)
        except ReachedError:
            return self.values
        raise ValueError(
            f"{batches.what}: forward(model, batch) must call the model it is given, but it did not call it."
        )


def part_between(gm: QuantizedGraphModule, inputs: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """Return the part of a graph from some nodes to the last of others, as a module that takes the values of the first."""
    graph, written = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in inputs:
        written[source] = graph.placeholder(source.name)

    def value(node: fx.Node) -> fx.Node:
        if node not in written:  # what every part reads for itself: a parameter, or a mode
            written[node] = graph.node_copy(node, value)
        return written[node]

    last = None
    for last in nodes:
        written[last] = graph.node_copy(last, value)
    graph.output(None if last is None else written[last])
    return fx.GraphModule(gm, graph, type(gm).__name__)


@contextmanager
def tuning(model: nn.Module) -> Iterator[None]:
    """Run a block with a model in eval mode and with layers that compute in float.

    Afterwards the training modes and the arithmetic of layers are restored. After an error, weights and quantizers are too.
    """
    check_links(model)
    layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
    before = [layer.training_arithmetic for layer in layers]
    for name, quantizer in quantizers_of(model).items():
        quantizer.name = name
    with ExitStack() as stack:
        stack.enter_context(unchanged_on_error(model, parameters=True))
        stack.enter_context(evaluating(model))
        try:
            for layer in layers:
                layer.training_arithmetic = TrainingArithmetic("float", "float")
            yield
        finally:
            for layer, arithmetic in zip(layers, before, strict=True):
                layer.training_arithmetic = arithmetic


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
