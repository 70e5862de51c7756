"""The lines of a report: one for each layer or op, and one for each quantized tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from qtoolkit.nn import (
    QuantMatMul,
    QuantModule,
    QuantMultiheadAttention,
    QuantScaledDotProductAttention,
    QuantWeighted,
    on_codes,
)
from qtoolkit.nn.computed_weights import computing_still
from qtoolkit.nn.product import described
from qtoolkit.quantizers.frozen import ShapedActivation
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.verdicts import Cause, Status, Verdict


@dataclass(frozen=True)
class LayerLine:
    """One layer or op.

    Attributes:
        name: Name of the layer or op.
        kind: The kind of op.
        weight: The spec of its weight.
        inputs: The quantizers of its inputs; for a layer outside a graph, of all tensors that it quantizes itself.
        verdict: Whether it is quantized, with the cause.
        quantizers: All quantizers that its config controls: of its weights, of its inputs, and between its internal ops.
        training: How a layer computes in training and which form of its input it keeps for backward
            (`qtoolkit.nn.set_training_arithmetic`); for a batch norm, the ops that are fused with it, and why no more.
        in_float: Why a layer with one weight does not compute in integers in training; for a model converted with
            arithmetic="integer", why its runtime computes the layer or op in float. None for others, and where they do.
    """

    name: str
    kind: str
    weight: str
    inputs: tuple[str, ...]
    verdict: Verdict
    quantizers: tuple[str, ...] = ()
    training: str = field(default="", compare=False)  # a converted model has the lines of the prepared one
    in_float: Cause | None = field(default=None, compare=False)

    @property
    def status(self) -> Status:
        """Whether it is quantized; compares equal to "quantized", "fused", "transparent" or "float"."""
        return self.verdict.status

    @property
    def reason(self) -> str:
        """Why it is float, or another remark."""
        return self.verdict.text

    def within(self, name: str) -> "LayerLine":
        """Return the line for a model that contains this one as submodule `name`, and whose config does not control it."""
        inputs = tuple(f"{name}.{quantizer}" for quantizer in self.inputs)
        return replace(self, name=f"{name}.{self.name}", inputs=inputs, quantizers=())


@dataclass(frozen=True)
class TensorLine:
    """One quantized tensor.

    Attributes:
        quantizer: Its quantizer.
        source: The op that computes it, by the name that a QConfigMapping takes: a module that is called several times computes
            several tensors. A tensor that no op of the graph computes has a name such as `attn.softmax` or
            `block.conv.input`.
        consumers: The ops that use it.
        spec: How it is quantized.
        shares_scale_with: Sources of the other tensors with the same quantizer.
        call: Which call of its source computes it; 1 is the first.
    """

    quantizer: str
    source: str
    consumers: tuple[str, ...]
    spec: str
    shares_scale_with: tuple[str, ...] = ()
    call: int = 1

    @property
    def title(self) -> str:
        """The name of the tensor: its source, with the call from the second on: `relu`, `relu (2)`."""
        return self.source if self.call == 1 else f"{self.source} ({self.call})"

    def renamed(self, names: Mapping[str, str], calls: Mapping[str, int]) -> "TensorLine":
        """Return the line with other names for the ops in `names`, and with the call of its source."""
        consumers, others = (tuple(names.get(op, op) for op in ops) for ops in (self.consumers, self.shares_scale_with))
        source, call = names.get(self.source, self.source), calls.get(self.source, 1)
        return replace(self, source=source, consumers=consumers, shares_scale_with=others, call=call)

    def within(self, name: str) -> "TensorLine":
        """Return the line for a model that contains this one as submodule `name`."""
        consumers, others = (tuple(f"{name}.{op}" for op in ops) for ops in (self.consumers, self.shares_scale_with))
        return TensorLine(f"{name}.{self.quantizer}", f"{name}.{self.source}", consumers, self.spec, others, self.call)


@dataclass(frozen=True)
class QuantizationReport:
    """Result of `quantization_report`; prints as a table.

    Attributes:
        layers: Every op of the model in order; for a model without a graph, its layers.
        tensors: Every quantized activation: first the graph's, then those that layers quantize themselves.
        following: Whether the range of each weight follows the weight in training (`TensorQuantizer.follows`), by the name of
            its quantizer; a converted model has none.
    """

    layers: tuple[LayerLine, ...]
    tensors: tuple[TensorLine, ...]
    following: Mapping[str, bool] = field(default_factory=dict)

    @property
    def quantized(self) -> tuple[LayerLine, ...]:
        """The quantized ops."""
        return tuple(line for line in self.layers if line.status is Status.QUANTIZED)

    @property
    def left_float(self) -> tuple[LayerLine, ...]:
        """The ops that stay in float."""
        return tuple(line for line in self.layers if line.status is Status.FLOAT)

    def __str__(self) -> str:
        titles = {line.quantizer: line.title for line in reversed(self.tensors)}
        rows = [("layer", "kind", "weight", "inputs", "status", "in training")]
        rows += [
            (x.name, x.kind, x.weight, ", ".join(titles.get(q, q) for q in x.inputs), x.reason or x.status, x.training)
            for x in self.layers
        ]
        tensors = [("quantizer", "made by", "taken by", "how", "scale shared with")]
        tensors += [
            (t.quantizer, t.title, ", ".join(t.consumers), t.spec, ", ".join(t.shares_scale_with)) for t in self.tensors
        ]
        head = f"{len(self.quantized)} ops quantized, {len(self.left_float)} left in float, {len(self.tensors)} tensors"
        lines = [head]
        if self.following:
            count = sum(self.following.values())
            lines.append(f"{count} of {len(self.following)} weight ranges follow the weights in training")
        return "\n".join([*lines, "", *table(rows), "", *table(tensors)])


def weight_of(layer: nn.Module) -> str:
    """Return the specs of a layer's weights in short form, or "" if they are float."""
    quantizers = layer.weight_quantizers().values() if isinstance(layer, QuantModule) else ()
    return ", ".join(dict.fromkeys(spec_of(quantizer) for quantizer in quantizers))


def training_of(layer: nn.Module, call: int = 0) -> tuple[str, Cause | None]:
    """Return how a call of a layer computes in training, and why not in integers; "" and None for other modules."""
    if isinstance(layer, QuantWeighted):
        with computing_still(layer):
            return on_codes.described(layer, call)
    if isinstance(layer, QuantMatMul):
        return described(layer.sources, layer.training_arithmetic), None
    if isinstance(layer, QuantMultiheadAttention | QuantScaledDotProductAttention):
        projections = layer.projections if isinstance(layer, QuantMultiheadAttention) else ()
        of_layers = dict.fromkeys(on_codes.described(each)[0] for each in projections)
        products = dict.fromkeys(described(sources, layer.training_arithmetic) for sources in layer.products)
        return "; ".join([*(f"projections {how}" for how in of_layers if how), *products]), None
    return "", None


def spec_of(quantizer: nn.Module | None) -> str:
    """Return the spec of a quantizer in short form."""
    rounding = quantizer.grid if isinstance(quantizer, ShapedActivation) else quantizer
    return rounding.spec.describe() if isinstance(rounding, Quantizer) else "float"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with columns as wide as their widest cell.

    Example:
        >>> table([("layer", "bits"), ("conv1", "8")])
        ['layer  bits', 'conv1  8']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
