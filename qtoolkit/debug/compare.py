"""compare(): compare a float and a quantized model layer by layer."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.debug.inside import Calls, quantized_inside, watching
from qtoolkit.graph.capture import trace
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes import split_silu
from qtoolkit.graph.passes.link_batch_norms import batch_norms
from qtoolkit.graph.passes.record import verdict_now
from qtoolkit.graph.plan import Cause, Status, Tracing
from qtoolkit.model_inputs import clone_tensors, tensors_of
from qtoolkit.model_state import evaluating
from qtoolkit.nn import LinkedBatchNorm, QuantModule
from qtoolkit.op_kinds.nodes import is_quantizer, kind_of, kind_of_module, name_of
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.switches import freeze_ranges
from qtoolkit.report.lines import table


@dataclass(frozen=True)
class Similarity:
    """Similarity of a quantized tensor and its float counterpart.

    Attributes:
        cosine: Cosine similarity; 1 for the same direction.
        sqnr: Signal-to-quantization-noise ratio in dB, 10 log10(|float|^2 / |float - quantized|^2); inf for equal tensors.
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
        return cls(cosine, 10 * math.log10(signal / noise) if signal else -math.inf)

    def __str__(self) -> str:
        return f"{self.cosine:.6f} {self.sqnr:6.1f} dB"


@dataclass(frozen=True)
class LayerComparison:
    """Comparison of one quantized layer or op.

    Attributes:
        name: Dotted name of the layer, or name of the op's node.
        kind: Kind of op.
        own: Similarity of its output if its inputs come from the float model: the error of this layer alone.
        accumulated: Similarity of its output in the quantized model, with the error of all layers before it.
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
        layers: The quantized layers, in ascending order of their own SQNR.
        output: Similarity of the models' outputs.
    """

    layers: tuple[LayerComparison, ...]
    output: Similarity

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


def compare(float_model: nn.Module, quantized: QuantizedGraphModule, inputs: Any, progress: bool = True) -> Comparison:
    """Run a float and a quantized model on the same inputs, and compare the outputs of every quantized layer.

    Both models run in eval mode without gradients, and no range changes; their modes are restored afterwards. The float model
    is traced with the options of `qtoolkit.prepare`. Layers inside leaf modules have lines too.

    Args:
        float_model: The model that was passed to `qtoolkit.prepare`; its parameters may have changed.
        quantized: What `qtoolkit.prepare` (calibrated) or `qtoolkit.convert` returned.
        inputs: A tuple of inputs, or one tensor.
        progress: Show a progress bar.

    Returns:
        Cosine and SQNR of each layer alone, accumulated, and of its weight; the worst layer first.

    Raises:
        TypeError: `quantized` was not prepared, or `float_model` is not a float module.
        ValueError: The graphs of the models differ.
        UntraceableError: The float model cannot be traced.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> prepared = qt.prepare(model)
        >>> batch = torch.rand(64, 8)
        >>> report = qt.calibrate(prepared, [batch], progress=False)
        >>> result = qt.debug.compare(model, prepared, batch)
        >>> min(layer.own.cosine for layer in result.layers) > 0.999
        True
    """
    _check(float_model, quantized)
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    traced = _trace(float_model, quantized, values)
    inside = quantized_inside(quantized)
    with torch.no_grad(), evaluating(traced), evaluating(quantized), freeze_ranges(quantized):
        reference = _Recorder(traced)
        with watching(traced, inside) as float_calls:
            expected = reference.run(*values)
        counterparts = _counterparts(traced, quantized)
        with (
            watching(quantized, inside) as calls,
            progress_bar("compare", "ops", progress, total=len(quantized.graph.nodes)) as bar,
        ):
            run = _SideBySide(quantized, counterparts, reference.values, bar)
            result = run.run(*values)
        layers = run.layers + [_compare_inside(quantized, name, float_calls, calls) for name in inside if calls[name]]
    layers.sort(key=lambda layer: layer.own.sqnr)
    return Comparison(tuple(layers), _similarity(expected, result))


def _check(float_model: nn.Module, quantized: QuantizedGraphModule) -> None:
    if not isinstance(quantized, QuantizedGraphModule):
        raise TypeError(
            f"compare: quantized must be what qtoolkit.prepare or qtoolkit.convert returned, got {type(quantized).__name__}."
        )
    if not isinstance(float_model, nn.Module) or isinstance(float_model, QuantizedGraphModule):
        raise TypeError(f"compare: float_model must be the float torch.nn.Module, got {type(float_model).__name__}.")


def _trace(float_model: nn.Module, quantized: QuantizedGraphModule, values: tuple[Any, ...]) -> QuantizedGraphModule:
    """Trace the float model with the options of `prepare`, and split what it split."""
    how = quantized.plan.tracing if quantized.plan is not None else Tracing()
    traced = trace.run(
        float_model,
        how.leaf_modules,
        how.skip,
        how.concrete_args,
        example_inputs=values if how.measured else None,
    )
    products = {node.name for node in quantized.graph.nodes if kind_of(node).name == "mul"}
    for node in list(traced.graph.nodes):
        if kind_of(node).name == "silu" and node.name in products:
            split_silu.split(node)
    traced.recompile()
    return traced


def _counterparts(traced: QuantizedGraphModule, quantized: QuantizedGraphModule) -> dict[str, str]:
    """Map each op of the quantized graph to its float node; a layer with a folded batch norm maps to the batch norm."""
    present = {node.name for node in quantized.graph.nodes}
    names = {node.name: node.name for node in traced.graph.nodes}
    inputs = [[node.name for node in gm.graph.find_nodes(op="placeholder")] for gm in (quantized, traced)]
    # Pickling may rename placeholders. A graph with fewer of them raises the error below.
    names |= dict(zip(*inputs, strict=False))
    for node, follower in batch_norms(traced):
        if follower.name not in present or _is_linked(quantized, follower):
            names[node.name] = follower.name
    computed = {} if quantized.plan is None else quantized.plan.computed
    names |= {name: names[how.last] for name, how in computed.items() if how.last in names}
    lost = [n.name for n in quantized.graph.nodes if not is_quantizer(n) and n.name not in names]
    if lost:
        raise ValueError(
            f"compare: the float model's graph has no {', '.join(lost)}; pass the model that qtoolkit.prepare was given."
        )
    return names


def _is_linked(quantized: QuantizedGraphModule, follower: fx.Node) -> bool:
    # In eval mode the preceding layer applies this batch norm.
    return follower.op == "call_module" and isinstance(quantized.get_submodule(str(follower.target)), LinkedBatchNorm)


class _Recorder(fx.Interpreter):
    """Runs a graph and stores a copy of each node's value, because later ops may modify it in place."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and store a copy of its value."""
        value = super().run_node(n)
        self.values[n.name] = clone_tensors(value)
        return value


class _SideBySide(fx.Interpreter):
    """Runs a quantized graph, and runs each quantized op on the float values too, to compare the outputs."""

    def __init__(
        self, gm: QuantizedGraphModule, counterparts: Mapping[str, str], reference: Mapping[str, Any], bar: Any
    ) -> None:
        super().__init__(gm)
        self.gm, self.counterparts, self.reference, self.bar = gm, counterparts, reference, bar
        self.layers: list[LayerComparison] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; if it is quantized, also run it on the float values. Later nodes get the quantized value."""
        value = super().run_node(n)
        if self._is_quantized(n):
            expected = self._float(n)
            self.layers.append(
                LayerComparison(
                    name_of(n),
                    str(kind_of(n)),
                    _similarity(expected, self._alone(n)),
                    _similarity(expected, value),
                    self._weight(n),
                )
            )
            worst = min(self.layers, key=lambda layer: layer.own.sqnr)
            note(self.bar, f"worst {worst.name}: {worst.own.sqnr:.1f} dB")
        self.bar.update()
        return value

    def _is_quantized(self, node: fx.Node) -> bool:
        if node.op not in ("call_module", "call_function", "call_method") or is_quantizer(node) or self.gm.plan is None:
            return False
        verdict = verdict_now(node, self.gm.plan)
        return verdict.status is Status.QUANTIZED and verdict.cause is Cause.COMPUTED

    def _alone(self, node: fx.Node) -> Any:
        args, kwargs = (fx.node.map_arg(a, self._entering) for a in (node.args, node.kwargs))
        return getattr(self, node.op)(node.target, args, kwargs)

    def _entering(self, node: fx.Node) -> Any:
        """Return an input of an op: the float value after the quantizers and transparent ops before the op."""
        return self._alone(node) if is_quantizer(node) or self._moves(node) else clone_tensors(self._float(node))

    def _moves(self, node: fx.Node) -> bool:
        return self.gm.plan is not None and self.gm.plan.backend.role(kind_of(node)) == "transparent"

    def _float(self, node: fx.Node) -> Any:
        return self.reference[self.counterparts[node.name]]

    def _weight(self, node: fx.Node) -> Similarity | None:
        return _compare_weight(self.gm.get_submodule(str(node.target))) if node.op == "call_module" else None


def _compare_inside(gm: QuantizedGraphModule, name: str, float_calls: Calls, calls: Calls) -> LayerComparison:
    """Compare a layer inside a leaf module over all its calls."""
    layer = gm.get_submodule(name)
    expected = [call.output for call in float_calls[name]]
    alone = [layer(*call.args, **call.kwargs) for call in float_calls[name]]
    accumulated = _similarity(expected, [call.output for call in calls[name]])
    return LayerComparison(
        name, str(kind_of_module(layer)), _similarity(expected, alone), accumulated, _compare_weight(layer)
    )


def _compare_weight(layer: nn.Module) -> Similarity | None:
    weights = layer.quantized_weights().values() if isinstance(layer, QuantModule) else ()
    if not weights:
        return None
    pairs = [(weight.flatten(), quantizer(weight).flatten()) for quantizer, weight in weights]
    return Similarity.of(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))


def _similarity(reference: Any, quantized: Any) -> Similarity:
    a, b = ([t.flatten().double() for t in tensors_of(v) if t.is_floating_point()] for v in (reference, quantized))
    return Similarity.of(torch.cat(a), torch.cat(b))
