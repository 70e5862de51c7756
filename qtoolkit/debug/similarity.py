"""Results of a comparison of two models: similarity of tensors, of outputs, and of layers over their recorded calls."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtoolkit.graph.nodes import kind_of_module
from qtoolkit.model_inputs import clone_tensors, tensors_of
from qtoolkit.model_state import removing
from qtoolkit.nn import QuantModule
from qtoolkit.progress import note
from qtoolkit.report.lines import table


@dataclass(frozen=True)
class Similarity:
    """Similarity of a quantized tensor and its float counterpart.

    Attributes:
        cosine: Cosine similarity; 1 for the same direction.
        sqnr: Signal-to-quantization-noise ratio in dB, 10 log10(|float|^2 / |float - quantized|^2); inf for equal tensors.

    Both are NaN if nothing can be compared: the shapes of the tensors differ, as for detections, or there are no tensors.
    """

    cosine: float
    sqnr: float

    @classmethod
    def of(cls, reference: Tensor, quantized: Tensor) -> "Similarity":
        """Compare two tensors of the same shape in float64.

        Example:
            >>> Similarity.of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
            Similarity(cosine=0.9984603532054125, sqnr=20.0)
        """
        a, b = reference.detach().double().flatten(), quantized.detach().double().flatten()
        signal, noise = float(a @ a), float((a - b) @ (a - b))
        if noise == 0:
            return cls(1.0, math.inf)
        norms = math.sqrt(signal * float(b @ b))
        cosine = float(a @ b) / norms if norms else 0.0
        ratio = signal / noise
        return cls(cosine, -math.inf if ratio == 0 else 10 * math.log10(ratio))

    def __str__(self) -> str:
        return f"{self.cosine:.6f} {self.sqnr:6.1f} dB"


@dataclass(frozen=True)
class LayerComparison:
    """Comparison of one quantized layer or op.

    Attributes:
        name: Dotted name of the layer, or name of the op's node.
        kind: Kind of op.
        own: Similarity of its output with inputs from the float model: the error of this layer alone.
        accumulated: Similarity of its output in the quantized model, including the errors of all layers before it.
        weight: Similarity of its fake-quantized weight and the float weight; None without a quantized weight.
    """

    name: str
    kind: str
    own: Similarity
    accumulated: Similarity
    weight: Similarity | None


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; prints as a table.

    Attributes:
        layers: The quantized layers, in ascending order of their own SQNR; layers with NaN come last.
        output: Similarity of the models' outputs: of floating-point tensors, or of integers, such as classes, if there are no
            others.
    """

    layers: tuple[LayerComparison, ...]
    output: Similarity

    @classmethod
    def of(cls, layers: Iterable[LayerComparison], reference: object, quantized: object) -> "Comparison":
        """Return the comparison of layers and outputs of two models."""
        return cls(tuple(sorted(layers, key=_badness)), similarity_of(reference, quantized))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values. Infinite values are not valid JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("layer", "kind", "own: cosine, SQNR", "accumulated", "weight")]
        rows += [
            (x.name, x.kind, str(x.own), str(x.accumulated), "" if x.weight is None else str(x.weight))
            for x in self.layers
        ]
        return "\n".join([f"{len(self.layers)} quantized layers, worst first; output {self.output}", "", *table(rows)])


class RecordedCall(NamedTuple):
    """One call of a layer."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object


Calls = dict[str, list[RecordedCall]]


def _badness(layer: LayerComparison) -> tuple[bool, float]:
    """Return the sort key of layers: the worst first, layers with NaN last."""
    return math.isnan(layer.own.sqnr), layer.own.sqnr


@contextmanager
def watching(model: nn.Module, names: Sequence[str]) -> Iterator[Calls]:
    """Record the calls of submodules within a `with` block."""
    calls: Calls = defaultdict(list)
    handles = [
        model.get_submodule(name).register_forward_hook(partial(_note, calls[name]), with_kwargs=True) for name in names
    ]
    with removing(handles):
        yield calls


def _note(
    calls: list[RecordedCall], _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
) -> None:
    calls.append(RecordedCall(clone_tensors(args), clone_tensors(kwargs), clone_tensors(output)))


def note_worst(bar: Any, layers: Sequence[LayerComparison]) -> None:
    """Show the layer with the largest own error."""
    if layers:
        worst = min(layers, key=_badness)
        note(bar, f"worst {worst.name}: {worst.own.sqnr:.1f} dB")


def compare_calls(model: nn.Module, name: str, last: str, float_calls: Calls, calls: Calls) -> LayerComparison:
    """Compare a layer of a model over all its calls with the float module of its name; `last` is the module with the output."""
    layer, expected = model.get_submodule(name), [call.output for call in float_calls[last]]
    alone = [layer(*call.args, **call.kwargs) for call in float_calls[name]]
    accumulated = similarity_of(expected, [call.output for call in calls[name]])
    return LayerComparison(
        name, str(kind_of_module(layer)), similarity_of(expected, alone), accumulated, compare_weight(layer)
    )


def compare_weight(layer: nn.Module) -> Similarity | None:
    """Compare the quantized weights of a layer with the float ones; None without quantized weights."""
    weights = layer.quantized_weights().values() if isinstance(layer, QuantModule) else ()
    if not weights:
        return None
    pairs = [(weight.flatten(), quantizer(weight).flatten()) for quantizer, weight in weights]
    return Similarity.of(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))


def similarity_of(reference: object, quantized: object) -> Similarity:
    """Compare the floating-point tensors in two values of the same structure; all tensors if there are no floats."""
    found = [tensors_of(value) for value in (reference, quantized)]
    if any(t.is_floating_point() for t in found[0]):
        found = [[t for t in tensors if t.is_floating_point()] for tensors in found]
    if not found[0] or [t.shape for t in found[0]] != [t.shape for t in found[1]]:
        return Similarity(math.nan, math.nan)
    a, b = (torch.cat([t.flatten().double() for t in tensors]) for tensors in found)
    return Similarity.of(a, b)
