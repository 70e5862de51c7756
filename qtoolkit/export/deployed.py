"""Comparison of all codes of a model with those that a runtime computes from its file, end to end."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qtoolkit.export.codes import (
    TIES_IN_SMALL_TENSORS,
    CodeCount,
    forward_hooks,
    largest_difference,
    layer_weights,
    same_grid,
    sum_of,
)
from qtoolkit.export.quantizer_nodes import QuantizerNode
from qtoolkit.export.runtimes import Executed, Layer
from qtoolkit.model_inputs import tensors_of
from qtoolkit.quantizers.frozen import Grid

SHOWN = 5  # names of layers in a line


@dataclass(frozen=True)
class RuntimeCodes:
    """How the codes of one runtime compare with the model's, end to end.

    Attributes:
        runtime: The runtime and its version.
        by_quantizer: The comparison at each activation quantizer, in the order of the file.
        output_difference: The largest absolute difference of the outputs.
        layers: The nodes that compute, as the runtime optimized them, and which of them compute on integer codes.
        conversions: How many nodes convert between floats and codes.
        not_compared: Quantizers whose codes cannot be read in the runtime, or that are not executed for these inputs.
        changed_by_reading: The largest difference in the outputs between the graph that users run and the one that also
            returns the codes.
        share: The share of the codes that may differ, by one step each, because the runtime rounds in another order.
        remark: What users of this runtime have to know, beside the figures; "" for nothing.
    """

    runtime: str
    by_quantizer: Mapping[str, CodeCount]
    output_difference: float
    layers: tuple[Layer, ...]
    conversions: int
    not_compared: tuple[str, ...]
    changed_by_reading: float
    share: float
    remark: str = ""

    @property
    def codes(self) -> CodeCount:
        """The sum over all quantizers."""
        return sum_of(self.by_quantizer.values())

    @property
    def first_difference(self) -> str | None:
        """The first quantizer in the order of the file at which a code differs; None if none does."""
        return next((name for name, count in self.by_quantizer.items() if count.differing), None)

    @property
    def integer_layers(self) -> tuple[Layer, ...]:
        """The nodes that compute on integer codes."""
        return tuple(layer for layer in self.layers if layer.integer)

    @property
    def float_layers(self) -> tuple[Layer, ...]:
        """The nodes that compute in float."""
        return tuple(layer for layer in self.layers if not layer.integer)

    def check(self) -> None:
        """Check that no more codes differ than the runtime's own order of rounding explains.

        Raises:
            RuntimeError: More codes differ, or codes could not be compared; the message names the first place.
        """
        if self.not_compared:
            raise RuntimeError(
                f"verify: {self.runtime} does not give the codes of {', '.join(map(repr, self.not_compared))}: it merged their "
                f"nodes with others, or these inputs do not reach them."
            )
        allowed = max(self.share * self.codes.compared, TIES_IN_SMALL_TENSORS if self.share else 0)
        first = self.first_difference
        if first is not None and (self.codes.differing > allowed or self.codes.steps > 1):
            raise RuntimeError(
                f"verify: {self.codes} in {self.runtime}; the first at {first!r}: {self.by_quantizer[first]}. The float "
                f"reference does not round as integer kernels do: verify qtoolkit.convert(prepared, arithmetic='integer')."
                f"{' ' * bool(self.remark)}{self.remark}"
            )

    def __str__(self) -> str:
        lines = [
            f"{self.runtime}, end to end: {self.codes}; outputs: largest difference {self.output_difference:.3g}",
            f"  in integers: {_counts(self.integer_layers)}",
            f"  in float:    {_with_names(self.float_layers)}; {self.conversions} conversions",
        ]
        first = self.first_difference
        lines += [] if first is None else [f"  first difference: {first}: {self.by_quantizer[first]}"]
        lines += [f"  not compared: {', '.join(self.not_compared)}"] if self.not_compared else []
        if self.changed_by_reading:
            lines.append(f"  reading the codes changes the outputs by up to {self.changed_by_reading:.3g}")
        lines += [f"  {self.remark}"] if self.remark else []
        return "\n".join(lines)


@dataclass(frozen=True)
class DeployedVerification:
    """What `verify` returns: the comparison with each runtime, by the runtime's name."""

    runtimes: Mapping[str, RuntimeCodes]

    def check(self) -> None:
        """Check every runtime; see `RuntimeCodes.check`.

        Raises:
            RuntimeError: Codes differ; the message names the first place.
        """
        for runtime in self.runtimes.values():
            runtime.check()

    def __str__(self) -> str:
        return "\n".join(map(str, self.runtimes.values()))


def _counts(layers: Iterable[Layer]) -> str:
    counts = Counter(layer.kernel for layer in layers)
    return ", ".join(f"{count} {kernel}" for kernel, count in counts.most_common()) or "none"


def _with_names(layers: Iterable[Layer]) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        names[layer.kernel].append(layer.name)
    return ", ".join(f"{len(of)} {kernel} ({_first(of)})" for kernel, of in names.items()) or "none"


def _first(names: Sequence[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


class ModelCodes:
    """The codes of a model's activation quantizers, from one run.

    Attributes:
        outputs: What the model returned.
        codes: The codes of each quantizer, by its dotted name, in the order of its calls.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.codes: dict[str, list[Any]] = defaultdict(list)
        of_weights = {grid for grid, _ in layer_weights(model).values()}
        modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Grid))
        self.names = {
            grid: name for name, grid in modules if grid.quantizing and not grid.of_weight and grid not in of_weights
        }
        with forward_hooks(self.names, self._keep), torch.no_grad():
            self.outputs = model(*args, **kwargs)

    def _keep(self, grid: Any, _: Any, output: Any) -> None:
        self.codes[self.names[grid]].append(grid.codes(output.detach()).cpu().numpy())

    def compare(self, theirs: Mapping[str, Sequence[Any]]) -> dict[str, CodeCount]:
        """Compare with a runtime's codes at each quantizer; without the quantizers that either side does not have.

        The exporter computes equal expressions once. A quantizer may thus have fewer nodes than calls, or only nodes of another
        quantizer with the same grid; the nearest then counts.
        """
        counts = {}
        for name in dict.fromkeys((*theirs, *self.codes)):
            calls, nodes = self.codes.get(name, []), theirs.get(name, ())
            if len(calls) == len(nodes):
                pairs = list(zip(calls, nodes, strict=True))
            else:
                pairs = list(_nearest(calls, nodes or [c for other in self._like(name) for c in theirs.get(other, ())]))
            if pairs and len(pairs) == len(calls) and all(ours.shape == node.shape for ours, node in pairs):
                counts[name] = sum_of(CodeCount.of(ours, node) for ours, node in pairs)
        return counts

    def _like(self, name: str) -> list[str]:
        grids = {name: grid for grid, name in self.names.items()}
        return [other for other, grid in grids.items() if other != name and same_grid(grid, grids[name])]


def _nearest(calls: Sequence[Any], nodes: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    for ours in calls:
        alike = [node for node in nodes if node.shape == ours.shape]
        if alike:
            yield ours, min(alike, key=lambda node: CodeCount.of(ours, node).differing)


def compare_execution(model: ModelCodes, executed: Executed, nodes: Sequence[QuantizerNode]) -> RuntimeCodes:
    """Compare a model with one execution of its file, whose quantizers have these nodes."""
    theirs: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        if node.codes in executed.codes:
            theirs[node.quantizer].append(executed.codes[node.codes])
    counts = model.compare(theirs)
    constant = {node.quantizer for node in nodes if node.is_constant}
    expected = dict.fromkeys((*(node.quantizer for node in nodes), *model.codes))
    return RuntimeCodes(
        executed.runtime,
        counts,
        largest_difference(tensors_of(model.outputs), executed.outputs),
        executed.layers,
        executed.conversions,
        tuple(name for name in expected if name not in counts and name not in constant),
        executed.changed_by_reading,
        executed.share,
        executed.remark,
    )
