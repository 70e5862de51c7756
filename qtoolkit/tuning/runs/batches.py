"""Run parts of a model on batches: up to a node of its graph, or up to a layer."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar

from torch import fx, nn

from qtoolkit.batches import Caller, check_batches, no_batch
from qtoolkit.eager.record import check_links
from qtoolkit.errors import warn
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import clone_tensors
from qtoolkit.model_state import attribute_kept, evaluating, unchanged_on_error
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.op_kinds.recorded import check_none
from qtoolkit.processes import ranks
from qtoolkit.quantizers.tensor_quantizer import quantizers_of, take_names

Forward = Callable[[nn.Module, Any], object]  # Any: the user's function names the type of its batches

T = TypeVar("T")


class ReachedError(Exception):
    """Raised to stop a model after the part that is needed."""


class Batches:
    """The user's batches, which are read several times; an iterator is stored as a list.

    `forward` is forward(model, batch), or None if batches are passed to the model directly; errors begin with `what`. Raises
    TypeError: batches is not an iterable, or forward is not a function. Warns if there are other processes, which may have
    other batches.
    """

    def __init__(self, batches: Iterable[object], forward: Forward | None, what: str) -> None:
        check_batches(what, batches, forward)
        if ranks() > 1:
            warn(
                f"{what}: this process tunes its model on its own batches, without communication with the other {ranks() - 1} "
                "of its group, so the models may differ; pass the same batches in all processes, or tune in one process and "
                "load its state dict in the others.",
            )
        self.batches = list(batches) if isinstance(batches, Iterator) else batches
        self.forward, self.what, self._call = forward, what, forward or Caller(what)
        self.count: int | None = None  # of batches, once they were read

    def __iter__(self) -> Iterator[object]:
        count = 0
        for count, batch in enumerate(self.batches, 1):  # noqa: B007
            yield batch
        if not count:
            raise no_batch(self.what)

    def each(self) -> Iterator[tuple[int, object]]:
        """Yield the index of each batch and the batch; None instead of a batch that is not read again.

        The first round reads the batches. Later rounds read them only for `forward`. Raises ValueError: there is no batch, or a
        later round has another number of batches.
        """
        if self.count is not None and self.forward is None:
            yield from ((place, None) for place in range(self.count))
            return
        place = -1
        for place, batch in enumerate(self):
            if place == self.count:
                break
            yield place, batch
        if self.count not in (None, place + 1):
            raise ValueError(
                f"{self.what}: batches must have the same number of batches each time they are read, got {self.count} first, "
                f"and now {'more' if place == self.count else place + 1}; pass a list."
            )
        self.count = place + 1

    def run_inside(self, model: nn.Module, batch: object, function: Callable[..., T], up_to: str) -> T:
        """Return function(*args, **kwargs) for the arguments of the first model call in `forward`, called from there.

        It runs in the context of `forward`, such as its autocast. Raises ValueError: `forward` does not call the model; and as
        in `run`.
        """
        inside = _Inside(model, function)
        with suppress(ReachedError):
            self.run(inside, batch, up_to)
        if not inside.results:
            raise ValueError(f"{self.what}: forward(model, batch) must call the given model, but it did not.")
        return inside.results[0]

    def run(self, model: nn.Module, batch: object, up_to: str = "") -> Any:
        """Run a model, or its part up to some layer, on a batch; raises like `Caller` and `explaining`."""
        with self.explaining(model, up_to):
            return self._call(model, batch)

    @contextmanager
    def explaining(self, model: nn.Module, up_to: str = "") -> Iterator[None]:
        """Raise ValueError for a RuntimeError of a model on a batch, unless a quantizer is not calibrated."""
        try:
            yield
        except RuntimeError as error:
            without = any(q.quantizing and not q.ready for q in quantizers_of(model).values())
            if type(error) is not RuntimeError or without:  # no memory is left, or a quantizer names itself
                raise
            where = f" up to {up_to!r}" if up_to else ""
            raise ValueError(
                f"{self.what}: the model does not run on a batch{where}: {error}. Pass the same batches as to "
                "qtoolkit.calibrate."
            ) from error


class _Inside(nn.Module, Generic[T]):
    """Stands for the model in a user's function: its first call runs another function instead, and stops."""

    def __init__(self, model: nn.Module, function: Callable[..., T]) -> None:
        super().__init__()
        self.model, self.function, self.results = model, function, list[T]()

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Run the function, and stop the function that called the model."""
        if not self.results:
            self.results.append(self.function(*args, **kwargs))
        raise ReachedError


def arguments_part(gm: QuantizedGraphModule) -> fx.GraphModule:
    """Return a module with the inputs of a model that returns a tuple of copies of its placeholders' values."""
    graph = fx.Graph()
    graph.set_codegen(gm.graph._codegen)
    inputs = [graph.node_copy(node) for node in gm.graph.nodes if node.op == "placeholder"]
    for node in gm.graph.find_nodes(op="call_function", target=check_none):  # an argument that is fixed takes nothing
        graph.node_copy(node, dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)).__getitem__)
    graph.output(tuple(graph.call_function(clone_tensors, (node,)) for node in inputs))
    return fx.GraphModule(gm, graph, type(gm).__name__)


def part_between(
    gm: QuantizedGraphModule,
    sources: Iterable[fx.Node],
    nodes: Iterable[fx.Node],
    results: Iterable[fx.Node],
    copied: Collection[fx.Node] = (),
    on_copies: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """Return a part of a graph, as a module that takes the values of some nodes and returns the values of `results` as a tuple.

    It also returns copies of the values of `copied`, which later ops do not change in place. The nodes `on_copies` compute on
    copies of their inputs, and change none of them in place. It shares the model's submodules and parameters.
    """
    graph, written, copies = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def value(node: fx.Node) -> fx.Node:
        if node not in written:  # what every part reads for itself: a parameter, or a mode
            written[node] = graph.node_copy(node, value)
        return written[node]

    def copy(node: fx.Node) -> fx.Node:
        return graph.call_function(clone_tensors, (value(node),))

    for source in sources:
        written[source] = graph.placeholder(source.name)
    for node in copied:
        if node in written:
            copies[node] = copy(node)
    for node in nodes:
        written[node] = graph.node_copy(node, copy if node in on_copies else value)
        if node in copied:
            copies[node] = copy(node)
    graph.output((*map(value, results), *(copies[node] for node in copied)))
    return fx.GraphModule(gm, graph, type(gm).__name__)


@contextmanager
def tuning(model: nn.Module) -> Iterator[None]:
    """Within a `with` block, set a model to eval mode and its layers to float arithmetic.

    Afterwards the training modes and the arithmetic of layers are restored; after an error also weights and quantizers.
    """
    check_links(model)
    layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
    take_names(quantizers_of(model))
    kept = attribute_kept(layers, "training_arithmetic")
    with unchanged_on_error(model, parameters=True), evaluating(model), kept:
        for layer in layers:
            layer.training_arithmetic = TrainingArithmetic("float", "float")
        yield
