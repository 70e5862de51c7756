"""What a report consists of: a line for each layer or op, and one for each quantized tensor."""

from dataclasses import dataclass, replace

from torch import nn

from qtoolkit.graph.plan import Status, Verdict
from qtoolkit.nn import QuantModule
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.tables import table


@dataclass(frozen=True)
class LayerLine:
    """One layer or op: its name, kind, how its weight and inputs are quantized, and why it is float where it is.

    Attributes:
        name: The layer's or op's name.
        kind: The kind of op.
        weight: How the weight is quantized.
        inputs: The quantizers of what it takes; of a layer outside a graph, of all tensors that it quantizes itself.
        verdict: Whether it is quantized, with the cause.
        quantizers: All quantizers that its config decides on: of its weights, its inputs, and between its own ops.
    """

    name: str
    kind: str
    weight: str
    inputs: tuple[str, ...]
    verdict: Verdict
    quantizers: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Whether it is quantized; compares equal to "quantized", "fused", "transparent" or "float"."""
        return self.verdict.status

    @property
    def reason(self) -> str:
        """Why it is float, or what else there is to say."""
        return self.verdict.text

    def within(self, name: str) -> "LayerLine":
        """Return the line as a model has it that holds this one under a name, and whose config decides on none of it."""
        inputs = tuple(f"{name}.{quantizer}" for quantizer in self.inputs)
        return replace(self, name=f"{name}.{self.name}", inputs=inputs, quantizers=())


@dataclass(frozen=True)
class TensorLine:
    """One quantized tensor: its quantizer, the op that makes it, the ops that take it, and how it is quantized.

    Of a tensor that no op of the graph makes, `source` is a name of its own: `attn.softmax`, `block.conv.input`.
    `shares_scale_with` are the ops whose tensors have the same quantizer.
    """

    quantizer: str
    source: str
    consumers: tuple[str, ...]
    spec: str
    shares_scale_with: tuple[str, ...] = ()

    def within(self, name: str) -> "TensorLine":
        """Return the line as a model has it that holds this one under a name."""
        consumers, others = (tuple(f"{name}.{op}" for op in ops) for ops in (self.consumers, self.shares_scale_with))
        return TensorLine(f"{name}.{self.quantizer}", f"{name}.{self.source}", consumers, self.spec, others)


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantization_report` returns: data, and a table when printed.

    Attributes:
        layers: Every op of the model, in order; of a model without a graph, its layers.
        tensors: Every quantized activation: those of the graph, then those that layers quantize themselves.
    """

    layers: tuple[LayerLine, ...]
    tensors: tuple[TensorLine, ...]

    @property
    def quantized(self) -> tuple[LayerLine, ...]:
        """The quantized ops."""
        return tuple(line for line in self.layers if line.status is Status.QUANTIZED)

    @property
    def left_float(self) -> tuple[LayerLine, ...]:
        """The ops that stay in float."""
        return tuple(line for line in self.layers if line.status is Status.FLOAT)

    def __str__(self) -> str:
        rows = [("layer", "kind", "weight", "inputs", "status")]
        rows += [(x.name, x.kind, x.weight, ", ".join(x.inputs), x.reason or x.status) for x in self.layers]
        tensors = [("quantizer", "made by", "taken by", "how", "scale shared with")]
        tensors += [
            (t.quantizer, t.source, ", ".join(t.consumers), t.spec, ", ".join(t.shares_scale_with))
            for t in self.tensors
        ]
        head = f"{len(self.quantized)} ops quantized, {len(self.left_float)} left in float, {len(self.tensors)} tensors"
        return "\n".join([head, "", *table(rows), "", *table(tensors)])


def quantizers_in(layer: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers in a layer by their names in it."""
    return {path: part for path, part in layer.named_modules() if isinstance(part, Quantizer)}


def weight_of(layer: nn.Module) -> str:
    """Return how a layer's weights are quantized; nothing where they are not."""
    quantizers = layer.weight_quantizers().values() if isinstance(layer, QuantModule) else ()
    return ", ".join(dict.fromkeys(spec_of(quantizer) for quantizer in quantizers))


def spec_of(quantizer: nn.Module | None) -> str:
    """Return a quantizer's spec in short."""
    return quantizer.spec.describe() if isinstance(quantizer, Quantizer) else "float"
