"""The data of a report: its lines, the quantizers, their inputs, sizes and operations."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.debug.sensitivity import Row, Sensitivity
from qtoolkit.debug.similarity import Comparison, LayerComparison
from qtoolkit.eager.record import plan_of
from qtoolkit.graph.plan import Plan
from qtoolkit.model_inputs import call_arguments, naming_misfits
from qtoolkit.model_state import evaluating, removing
from qtoolkit.nn import QuantModule
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.quantizers.clip_range import clip_range, share_clipped
from qtoolkit.quantizers.frozen import Grid, ShapedActivation
from qtoolkit.quantizers.observers import HistogramObserver
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.switches import freeze_ranges
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report import LayerLine, QuantizationReport, quantization_report
from qtoolkit.report.layer_costs import bit_product, count_macs, layers_of, stored_bytes


@dataclass(frozen=True)
class Values:
    """The inputs of a quantizer."""

    histogram: HistogramObserver  # the histogram of all its values
    clipped: float | None  # the share of the values that its grid clips; None if it has no grid of its own


@dataclass(frozen=True)
class Cost:
    """The cost of a layer."""

    name: str  # its dotted name
    kind: str  # its kind of op
    config: QConfig  # how its weight and its input are quantized; None in it for float
    weights: int  # the number of its weights
    bytes: float  # the size of its weights as they are stored
    macs: int | None  # multiplications with a weight in one forward of the inputs; None without inputs

    @property
    def float_bytes(self) -> float:
        """The size of its weights in float32."""
        return stored_bytes(self.weights, None, 0)

    @property
    def bit_operations(self) -> int | None:
        """The number of multiplications times the bits of both factors."""
        return None if self.macs is None else self.macs * bit_product(self.config)


@dataclass(frozen=True)
class ReportFacts:
    """The data for all sections of a report."""

    model: nn.Module  # the model
    report: QuantizationReport  # its lines
    plan: Plan | None  # what was decided; None for a model that was neither prepared nor replaced
    quantizers: Mapping[str, Quantizer]  # its quantizers, by the names that the lines have
    values: Mapping[str, Values]  # what each quantizer of an activation got; empty without inputs
    costs: tuple[Cost, ...]  # the layers with a weight
    comparison: Comparison | None  # the errors of its layers, or None
    sensitivity: Sensitivity | None  # what each layer costs in score, or None

    @property
    def errors(self) -> dict[str, LayerComparison]:
        """The errors by layer name."""
        return {} if self.comparison is None else {layer.name: layer for layer in self.comparison.layers}

    @property
    def drops(self) -> dict[str, Row]:
        """The sensitivity by layer name."""
        return {} if self.sensitivity is None else {row.name: row for row in self.sensitivity.rows}

    @property
    def titles(self) -> dict[str, str]:
        """The display name of each quantizer: its first tensor, as in the model."""
        return {line.quantizer: line.title for line in reversed(self.report.tensors)}

    @property
    def reasons(self) -> dict[str, str]:
        """The rules that require each quantizer, by its name."""
        found: dict[str, dict[str, None]] = {}
        for edge in () if self.plan is None else self.plan.edges:
            found.setdefault(edge.quantizer, {}).setdefault(edge.why)
        return {name: "; ".join(rules) for name, rules in found.items()}


def gather(
    model: nn.Module, inputs: object, comparison: Comparison | None, sensitivity: Sensitivity | None
) -> ReportFacts:
    """Return the data of a model; with inputs it runs twice in eval mode, and no range changes."""
    report, found = quantization_report(model), quantizers_in(model)
    with freeze_ranges(model):
        values = {} if inputs is None else _values_of(model, found, inputs)
        quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantWeighted)}
        layers = {name: module for name, module in (quantized | layers_of(model)).items() if name}
        macs = {} if inputs is None else count_macs(model, layers, inputs)
        lines = {line.name: line for line in report.layers}
        costs = tuple(_cost(name, layer, lines.get(name), found, macs.get(name)) for name, layer in layers.items())
    return ReportFacts(model, report, plan_of(model), found, values, costs, comparison, sensitivity)


def quantizers_in(model: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers of a model by their names in a report; a quantizer with a shaping part has one name."""
    found, shaped = named_quantizers(model), dict[nn.Module, str]()
    for name, module in model.named_modules():
        if isinstance(module, ShapedActivation):
            shaped[module.grid] = name
    return {shaped.get(quantizer, name): quantizer for name, quantizer in found.items()}


def known_range(quantizer: Quantizer) -> tuple[Tensor, Tensor] | None:
    """Return the range of a quantizer, in the scale's shape; None without a static grid."""
    if not isinstance(quantizer, TensorQuantizer | Grid) or not quantizer.ready or getattr(quantizer, "dynamic", False):
        return None
    return clip_range(quantizer)


def ends_of(quantizer: Quantizer) -> tuple[float, float] | None:
    """Return the lowest and the highest value of a quantizer's grid, over all channels; None as `known_range`."""
    known = known_range(quantizer)
    return None if known is None else (float(known[0].min()), float(known[1].max()))


# ---- on inputs


class _Listener:
    """A histogram of a quantizer's inputs, and a per-channel histogram for the share of clipped values."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer, spec = quantizer, quantizer.spec
        self.all = HistogramObserver(QuantSpec())
        self.clips = spec.group_size is None and known_range(quantizer) is not None
        shape = tuple(quantizer.scale.shape) if self.clips and spec.axis is not None else ()
        by_axis = QuantSpec(axis=spec.axis)
        self.by_channel = HistogramObserver(by_axis, shape, quantizer.group) if shape else self.all

    @torch.no_grad()
    def hear(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward hook: record an input."""
        for observer in dict.fromkeys((self.all, self.by_channel)):
            observer.to(args[0].device)(args[0].float())

    def read(self) -> Values:
        """Return the recorded values, and the share of clipped values if the quantizer has a range and no groups."""
        clipped = share_clipped(self.quantizer, self.by_channel) if self.clips else None  # type: ignore[arg-type]
        return Values(self.all, clipped)


def _values_of(model: nn.Module, quantizers: Mapping[str, Quantizer], inputs: object) -> dict[str, Values]:
    listeners = {name: _Listener(quantizer) for name, quantizer in quantizers.items() if not quantizer.of_weight}
    args, kwargs = call_arguments(model, inputs, "report: inputs do")
    handles = [each.quantizer.register_forward_pre_hook(each.hear) for each in listeners.values()]
    with removing(handles), naming_misfits(model, inputs, "report: inputs do"), torch.no_grad(), evaluating(model):
        model(*args, **kwargs)
    return {name: each.read() for name, each in listeners.items() if each.all.seen() and each.all.finite()}


# ---- costs


def _cost(
    name: str, layer: nn.Module, line: LayerLine | None, quantizers: Mapping[str, Quantizer], macs: int | None
) -> Cost:
    own = next(iter(layer.weight_quantizers().values()), None) if isinstance(layer, QuantModule) else None
    inputs = () if line is None else line.inputs
    activation = next((quantizers[each].spec for each in inputs if each in quantizers), None)
    weight, scale = (None, None) if own is None else (own.spec, getattr(own, "scale", None))
    count = layer.get_parameter("weight").numel()
    size = stored_bytes(count, weight, 0 if scale is None else scale.numel())
    kind = "" if line is None else line.kind
    return Cost(name, kind, QConfig(activation, weight), count, size, macs)
