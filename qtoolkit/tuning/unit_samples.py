"""UnitSamples: what units are learned from, for each batch: their inputs, and their outputs in the float model."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_state import device_of
from qtoolkit.tuning.cache import BatchCache
from qtoolkit.tuning.importance import Importance, Loss
from qtoolkit.tuning.learning import Options
from qtoolkit.tuning.running import Batches
from qtoolkit.tuning.stepwise import Stepwise
from qtoolkit.tuning.units import Unit


class UnitSamples:
    """A model and its float twin that run on all batches from unit to unit, in a `with` block.

    Args:
        gm: The model. A unit's inputs are those of the model as it is when the unit is reached.
        reference: The float model, with the same graph.
        units: The units, in order.
        data: The batches.
        options: Whether the inputs in the float model are wanted too, for `drop`; and the seed of the loss "kl".
        loss: What the importance of the outputs' elements comes from, or None.
        limit: Bytes that are kept in memory; the others are in temporary files. One half is for the unit at hand.
    """

    def __init__(
        self,
        gm: QuantizedGraphModule,
        reference: QuantizedGraphModule,
        units: Sequence[Unit],
        data: Batches,
        options: Options,
        loss: Loss | None,
        limit: float,
    ) -> None:
        twins = {node.name: node for node in reference.graph.nodes}
        inputs = [tuple(twins[node.name] for node in unit.inputs if options.drop) for unit in units]
        self._outputs = [twins[unit.output.name] for unit in units]
        goals = [(*before, output) for before, output in zip(inputs, self._outputs, strict=True)]
        self.reference, self.units, self.data, self.options, self.loss = reference, units, data, options, loss
        self._limit, self._device, self._stack = limit, device_of(gm) or torch.device("cpu"), ExitStack()
        self._quantized = Stepwise(gm, [unit.inputs for unit in units], data, limit / 6)
        self._in_float = Stepwise(reference, goals, data, limit / 6)
        self._importances = BatchCache(limit / 6, self._device)
        self._first: int | None = None  # the place of the first unit that is reached

    def __enter__(self) -> Self:
        for each in (self._quantized, self._in_float, self._importances):
            self._stack.enter_context(each)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cache(self) -> BatchCache:
        """Return an empty cache for the samples of one unit."""
        return BatchCache(self._limit / 2, self._device)

    def fill(self, cache: BatchCache, place: int) -> None:
        """Add to a cache for each batch a unit's inputs, its inputs and output in float, and the importance, or None.

        Args:
            cache: The cache.
            place: The place of the unit, behind that of the last call.
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
        """Take from its cache the importance of a unit's output in a batch."""
        if self.loss is None or self._first is None:
            return None
        at = index * (len(self.units) - self._first) + place - self._first
        importance: list[Tensor] = self._importances[at]
        self._importances[at] = None
        return importance
