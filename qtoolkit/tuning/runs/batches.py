"""Running parts of a model on batches: up to a node of its graph, or up to a layer."""

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
    """A part of a model has run as far as it was wanted."""


class Batches:
    """The batches that the user gave, which are read several times; an iterator is stored as a list.

    `forward` is forward(model, batch), or None for batches that the model takes; errors begin with `what`. Raises
    TypeError: it is no iterable of batches, or forward is no function. Warns where there are other processes, which have
    batches of their own.
    """

    def __init__(self, batches: Iterable[object], forward: Forward | None, what: str) -> None:
        check_batches(what, batches, forward)
        if ranks() > 1:
            warn(
                f"{what}: this process tunes its model by its own batches, and merges nothing with the other {ranks() - 1} of "
                f"its group, so that their models may differ; give all processes the same batches, or tune in one process and "
                f"load its state dict in the others.",
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
        """Yield the place of each batch and the batch; None instead of a batch that is not read again.

        The first round reads the batches. Later ones read them only for `forward`. Raises ValueError: there is no batch, or
        a later round has another number of them.
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
                f"{self.what}: batches must give as many batches each time they are read, got {self.count} at first, and now "
                f"{'more' if place == self.count else place + 1}; pass a list."
            )
        self.count = place + 1

    def run_inside(self, model: nn.Module, batch: object, function: Callable[..., T], up_to: str) -> T:
        """Return function(*args, **kwargs) for the arguments of the first call of a model by `forward`, called from there.

        It runs in the autocast, for example, that `forward` sets. Raises ValueError: `forward` does not call the model; and
        as `run`.
        """
        inside = _Inside(model, function)
        with suppress(ReachedError):
            self.run(inside, batch, up_to)
        if not inside.results:
            raise ValueError(
                f"{self.what}: forward(model, batch) must call the model it is given, but it did not call it."
            )
        return inside.results[0]

    def run(self, model: nn.Module, batch: object, up_to: str = "") -> Any:
        """Run a model, or its part up to some layer, on a batch; raises as `Caller` and `explaining`."""
        with self.explaining(model, up_to):
            return self._call(model, batch)

    @contextmanager
    def explaining(self, model: nn.Module, up_to: str = "") -> Iterator[None]:
        """Raise ValueError for a RuntimeError of a model that runs on a batch, unless a quantizer has no range yet."""
        try:
            yield
        except RuntimeError as error:
            without = any(q.quantizing and not q.ready for q in quantizers_of(model).values())
            if type(error) is not RuntimeError or without:  # no memory is left, or a quantizer names itself
                raise
            where = f" up to {up_to!r}" if up_to else ""
            raise ValueError(
                f"{self.what}: the model does not run on a batch{where}: {error}. Pass the batches on which "
                f"qtoolkit.calibrate runs."
            ) from error


class _Inside(nn.Module, Generic[T]):
    """What a function of the user calls as the model: its first call runs another function instead, and stops."""

    def __init__(self, model: nn.Module, function: Callable[..., T]) -> None:
        super().__init__()
        self.model, self.function, self.results = model, function, list[T]()

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Run the function, and stop the function that called the model."""
        if not self.results:
            self.results.append(self.function(*args, **kwargs))
        raise ReachedError


def arguments_part(gm: QuantizedGraphModule) -> fx.GraphModule:
    """Return a module that takes what a model takes, and returns a tuple of copies of the values of its placeholders."""
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
    """Return a part of a graph, as a module that takes the values of some nodes and returns a tuple: the values of `results`.

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
    """Run a block with a model in eval mode and with layers that compute in float.

    Afterwards the training modes and the arithmetic of layers are restored. After an error, weights and quantizers are too.
    """
    check_links(model)
    layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
    take_names(quantizers_of(model))
    kept = attribute_kept(layers, "training_arithmetic")
    with unchanged_on_error(model, parameters=True), evaluating(model), kept:
        for layer in layers:
            layer.training_arithmetic = TrainingArithmetic("float", "float")
        yield
