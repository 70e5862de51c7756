"""Samples for learning units, for each batch: inputs, outputs of the float model, and importance of each element."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.nn import functional as F

from qtoolkit.errors import with_article
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import clone_tensors, tensors_of
from qtoolkit.model_state import device_of
from qtoolkit.tuning.rounding.learning import Options, Sample
from qtoolkit.tuning.rounding.units import RoundingUnit
from qtoolkit.tuning.runs.batches import Batches
from qtoolkit.tuning.runs.cache import BatchCache
from qtoolkit.tuning.runs.stepwise import Stepwise

LossOfTask = Callable[[Any, Any], Tensor]  # of what the user's model returns, and of a batch
Loss = LossOfTask | Literal["kl"]


class UnitSamples(ExitStack):
    """Runs a model and its float copy, with the same graph, on all batches from unit to unit, in a `with` block.

    A unit's inputs come from the model at the time when the unit is reached. With `options.drop` the inputs of the float model
    are also kept, and with a loss the importance of the outputs' elements. Up to `limit` bytes are in memory, one half of them
    for the current unit; the rest is in temporary files.
    """

    def __init__(
        self,
        gm: QuantizedGraphModule,
        reference: QuantizedGraphModule,
        units: Sequence[RoundingUnit],
        data: Batches,
        options: Options,
        loss: Loss | None,
        limit: float,
    ) -> None:
        super().__init__()
        twins = {node.name: node for node in reference.graph.nodes}
        inputs = [tuple(twins[node.name] for node in unit.inputs if options.drop) for unit in units]
        self._outputs = [twins[unit.output.name] for unit in units]
        goals = [(*before, output) for before, output in zip(inputs, self._outputs, strict=True)]
        self.reference, self.units, self.data, self.options, self.loss = reference, units, data, options, loss
        self._limit, self._device = limit, device_of(gm) or torch.device("cpu")
        self._quantized = Stepwise(gm, [unit.inputs for unit in units], data, limit / 6)
        self._in_float = Stepwise(reference, goals, data, limit / 6)
        self._importances = BatchCache[list[Tensor] | None](limit / 6, self._device)
        for each in (self._quantized, self._in_float, self._importances):
            self.enter_context(each)
        self._first: int | None = None  # the place of the first unit that is reached

    def cache(self) -> BatchCache[Sample]:
        """Return an empty cache for the samples of one unit."""
        return BatchCache(self._limit / 2, self._device)

    def fill(self, cache: BatchCache[Sample], place: int) -> None:
        """Add to a cache, for each batch, a unit's inputs, its float inputs and outputs, and the importance, or None.

        The unit must come after the last call's unit.
        """
        name, weighting = self.units[place].name, None
        if self._first is None:
            self._first = place
            if self.loss is not None:
                seed = self.options.seed * 100_003
                weighting = Importance(self.reference, self._outputs[place:], self.loss, seed)
        self._in_float.begin(place, name)
        self._quantized.begin(place, name)
        with torch.no_grad():
            for index, batch in self.data.each():
                *before, output = self._in_float.run(index, batch)
                inputs = self._quantized.run(index, batch)
                for importance in () if weighting is None else weighting.of(self.data, batch):
                    self._importances.append(importance)
                cache.append((list(inputs), before, output, self._importance_of(place, index)))

    def _importance_of(self, place: int, index: int) -> list[Tensor] | None:
        """Return the importance of a unit's output in a batch, from its cache."""
        if self.loss is None or self._first is None:
            return None
        at = index * (len(self.units) - self._first) + place - self._first
        importance = self._importances[at]
        self._importances[at] = None
        return importance


# ---- the squared gradient of a loss (BRECQ, arXiv 2102.05426, section 3.3)


class Importance:
    """The importance of the elements of nodes' values: the diagonal of the Fisher information of a loss there.

    The parameters of the model stop requiring gradients. The loss is loss(output, batch), a scalar; or "kl": labels are drawn,
    with the seed, from the distribution of the model's logits, and the loss is the cross entropy. The mean of its squared
    gradients is the second derivative of the KL divergence from that distribution.
    """

    def __init__(self, model: QuantizedGraphModule, nodes: Sequence[fx.Node], loss: Loss, seed: int) -> None:
        self.model = _NodeRecorder(model.requires_grad_(False), nodes)
        self.random = torch.Generator(device_of(model) or "cpu").manual_seed(seed)
        self.loss: LossOfTask = self._kl if loss == "kl" else loss

    def of(self, data: Batches, batch: object) -> list[list[Tensor]]:
        """Return the importance of each element of each node's tensors for a batch, by one backward pass.

        Raises ValueError: the loss is not a scalar that depends on the model's output, or "kl" gets no logits.
        """
        with torch.enable_grad():
            loss = self.loss(data.run(self.model, batch), batch)
            watched = [tensors_of(value) for value in self.model.watched]
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"{data.what}: loss(output, batch) must return a tensor with one element that depends on the model's "
                    f"output, got {_described(loss)}; write a function such as lambda output, batch: "
                    f"torch.nn.functional.cross_entropy(output, batch[1]), and return the output from forward(model, batch)."
                )
            floating = [tensor for tensors in watched for tensor in tensors if tensor.requires_grad]
            gradients = iter(torch.autograd.grad(loss.sum(), floating, allow_unused=True))
        return [[_squared(tensor, gradients) for tensor in tensors] for tensors in watched]

    def _kl(self, output: object, batch: object) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() < 2 or not output.is_floating_point():
            raise ValueError(
                "reconstruct: loss='kl' needs models that return logits as one tensor (N, classes, ...), got "
                f"{_described(output)}; pass the loss of the task, loss=lambda output, batch: ...."
            )
        logits = output.movedim(1, -1).flatten(0, -2).float()
        drawn = torch.multinomial(logits.detach().softmax(1), 1, generator=self.random)[:, 0]
        return F.cross_entropy(logits, drawn, reduction="sum")


def _squared(tensor: Tensor, gradients: Iterator[Tensor | None]) -> Tensor:
    gradient = next(gradients) if tensor.requires_grad else None
    return torch.zeros_like(tensor) if gradient is None else gradient.float().square()


class _NodeRecorder(nn.Module):
    """A model that keeps the values of nodes as tensors with gradients."""

    def __init__(self, gm: QuantizedGraphModule, nodes: Sequence[fx.Node]) -> None:
        super().__init__()
        graph, written = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.set_codegen(gm.graph._codegen)
        watched = dict[fx.Node, fx.Node]()
        for each in gm.graph.nodes:
            if each.op == "output":
                graph.output((fx.node.map_arg(each.args[0], written.__getitem__), tuple(watched[n] for n in nodes)))
                break
            written[each] = graph.node_copy(each, written.__getitem__)
            if each in nodes:
                watched[each] = graph.call_function(with_gradients, (written[each],))
                # A later op may change it in place.
                written[each] = graph.call_function(clone_tensors, (watched[each],))
        self.inner = fx.GraphModule(gm, graph, type(gm).__name__)
        self.watched: Sequence[object] = ()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the model's output; values that do not depend on the nodes also require gradients, for any loss."""
        output, self.watched = self.inner(*args, **kwargs)
        return with_gradients(output)


def with_gradients(value: Argument) -> Argument:
    """Return a value in which floating-point tensors without a gradient are leaves of an autograd graph."""
    return fx.node.map_aggregate(value, _with_gradient)


def _with_gradient(value: Argument) -> Argument:
    if not isinstance(value, Tensor) or value.requires_grad:
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return with_article(type(value))
    return f"a tensor of shape {tuple(value.shape)} {'with' if value.requires_grad else 'without'} a gradient"
