"""compare(): compare a float and a quantized model layer by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from qtoolkit.debug.similarity import (
    Calls,
    Comparison,
    LayerComparison,
    Similarity,
    compare_calls,
    compare_weight,
    note_worst,
    similarity_of,
    watching,
)
from qtoolkit.eager.record import chains_of
from qtoolkit.errors import check_flags
from qtoolkit.graph.capture import trace
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.nodes import is_quantizer, kind_of, name_of
from qtoolkit.graph.passes import split_silu
from qtoolkit.graph.passes.link_batch_norms import batch_norms
from qtoolkit.graph.plan import Tracing
from qtoolkit.graph.verdict_now import verdict_now
from qtoolkit.model_inputs import call_arguments, clone_tensors, naming_misfits
from qtoolkit.model_state import evaluating, random_state_kept
from qtoolkit.nn import LinkedBatchNorm
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.progress import progress_bar
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.switches import freeze_ranges
from qtoolkit.report import quantization_report
from qtoolkit.shared_modules import modules_by_name
from qtoolkit.verdicts import Cause, Status
from qtoolkit.wrapped import unwrapped


def compare(float_model: nn.Module, quantized: nn.Module, inputs: object, progress: bool = True) -> Comparison:
    """Run a float and a quantized model on the same inputs, and compare the outputs of every quantized layer.

    Both models run in eval mode without gradients, with the same random numbers, and no range changes. Their modes and the
    random number generators are restored afterwards. In graph mode, the float model is traced with the options of
    `qtoolkit.prepare`; layers inside leaf modules are included. Without a graph, the calls of the layers in both models are
    compared.

    Args:
        float_model: The model that was quantized; its parameters may have changed.
        quantized: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace` (calibrated), or of `qtoolkit.convert`.
        inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor.
        progress: Show a progress bar.

    Returns:
        Cosine similarity and SQNR of each layer: alone, accumulated, and for its weight; the worst layer first.

    Raises:
        TypeError: `quantized` was not prepared, or `float_model` is not a float module.
        ValueError: The graphs of the models differ. Without a graph: the numbers of calls of a layer differ, or a submodule was
            prepared separately.
        UntraceableError: The float model cannot be traced.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> prepared = qt.prepare(model, backend="tensorrt")
        >>> batch = torch.rand(64, 8)
        >>> report = qt.calibrate(prepared, [batch], progress=False)
        >>> result = qt.debug.compare(model, prepared, batch)
        >>> min(layer.own.cosine for layer in result.layers) > 0.999
        True
    """
    check_flags("compare", progress=progress)
    _check(float_model, quantized)
    float_model, quantized = unwrapped(float_model), unwrapped(quantized)
    if not isinstance(quantized, QuantizedGraphModule):
        return _compare_modules(float_model, quantized, inputs, progress)
    values, kwargs = call_arguments(quantized, inputs, "compare: inputs do")
    if kwargs:
        raise TypeError(
            f"compare: inputs of a graph-mode model must be positional, got {', '.join(map(repr, kwargs))} by name."
        )
    traced = _trace(float_model, quantized, values)
    # Calls of layers inside leaf modules are not in the graph.
    verdicts = {} if (plan := plan_in(quantized)) is None else plan.inside
    inside = [name for name, verdict in verdicts.items() if verdict.status is Status.QUANTIZED]
    with torch.no_grad(), evaluating(traced), evaluating(quantized), freeze_ranges(quantized):
        reference = _Recorder(traced)
        with (
            random_state_kept(quantized),
            naming_misfits(quantized, inputs, "compare: inputs do"),
            watching(traced, inside) as float_calls,
        ):
            expected = reference.run(*values)
        counterparts = _counterparts(traced, quantized)
        with (
            random_state_kept(quantized),
            watching(quantized, inside) as calls,
            progress_bar("compare", "ops", progress, total=len(quantized.graph.nodes)) as bar,
        ):
            run = _SideBySide(quantized, counterparts, reference.values, bar)
            result = run.run(*values)
        called = (name for name in inside if calls[name])
        layers = [*run.layers, *(compare_calls(quantized, name, name, float_calls, calls) for name in called)]
    return Comparison.of(layers, expected, result)


def _check(float_model: object, quantized: object) -> None:
    if not isinstance(quantized, nn.Module) or not named_quantizers(quantized):
        raise TypeError(
            "compare: quantized must be the result of qtoolkit.prepare, qtoolkit.quant_modules.replace or qtoolkit.convert, "
            f"got {type(quantized).__name__}."
        )
    if not isinstance(float_model, nn.Module) or isinstance(float_model, QuantizedGraphModule):
        raise TypeError(f"compare: float_model must be the float torch.nn.Module, got {type(float_model).__name__}.")


def _trace(float_model: nn.Module, quantized: QuantizedGraphModule, values: tuple[object, ...]) -> QuantizedGraphModule:
    """Trace the float model with the options of `prepare`, and split what it split."""
    how = Tracing() if (plan := plan_in(quantized)) is None else plan.tracing
    traced = trace.run(
        float_model, how.leaf_modules, how.skip, how.concrete_args, example_inputs=values if how.measured else None
    ).gm
    products = {node.name for node in quantized.graph.nodes if kind_of(node).elementwise_product}
    for node in list(traced.graph.nodes):
        if kind_of(node).has_sigmoid_gate and node.name in products:
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
    computed = {} if (plan := plan_in(quantized)) is None else plan.computed
    names |= {name: names[how.last] for name, how in computed.items() if how.last in names}
    lost = [n.name for n in quantized.graph.nodes if not is_quantizer(n) and n.name not in names]
    if lost:
        raise ValueError(
            f"compare: the float model's graph has no {', '.join(lost)}; pass the float model that was given to "
            "qtoolkit.prepare."
        )
    return names


def _is_linked(quantized: QuantizedGraphModule, follower: fx.Node) -> bool:
    # In eval mode the preceding layer applies this batch norm.
    return follower.op == "call_module" and isinstance(quantized.get_submodule(str(follower.target)), LinkedBatchNorm)


class _Recorder(fx.Interpreter):
    """Runs a graph and stores a copy of each node's value, because later ops may modify it in place."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Argument] = {}

    def run_node(self, n: fx.Node) -> object:
        """Run a node and store a copy of its value."""
        value = super().run_node(n)
        self.values[n.name] = clone_tensors(value)
        return value


class _SideBySide(fx.Interpreter):
    """Runs a quantized graph, and runs each quantized op on the float values too, to compare the outputs."""

    def __init__(
        self, gm: QuantizedGraphModule, counterparts: Mapping[str, str], reference: Mapping[str, Argument], bar: Any
    ) -> None:
        super().__init__(gm)
        self.gm, self.counterparts, self.reference, self.bar = gm, counterparts, reference, bar
        self.layers: list[LayerComparison] = []

    def run_node(self, n: fx.Node) -> object:
        """Run a node; if it is quantized, also run it on the float values. Later nodes get the quantized value."""
        value = super().run_node(n)
        if self._is_quantized(n):
            expected = self._float(n)
            own, accumulated = similarity_of(expected, self._alone(n)), similarity_of(expected, value)
            self.layers.append(LayerComparison(name_of(n), str(kind_of(n)), own, accumulated, self._weight(n)))
            note_worst(self.bar, self.layers)
        self.bar.update()
        return value

    def _is_quantized(self, node: fx.Node) -> bool:
        plan = plan_in(self.gm)
        if plan is None or is_quantizer(node) or node.op not in ("call_module", "call_function", "call_method"):
            return False
        verdict = verdict_now(node, plan)
        return verdict.status is Status.QUANTIZED and verdict.cause is Cause.COMPUTED

    def _alone(self, node: fx.Node) -> Argument:
        args, kwargs = (fx.node.map_arg(a, self._entering) for a in (node.args, node.kwargs))
        value: Argument = getattr(self, node.op)(node.target, args, kwargs)
        return value

    def _entering(self, node: fx.Node) -> Argument:
        """Return an input of an op: the float value after the quantizers and transparent ops before the op."""
        moves = plan_in(self.gm) is not None and self.gm.plan.backend.role(kind_of(node)) == "transparent"
        return self._alone(node) if moves or is_quantizer(node) else clone_tensors(self._float(node))

    def _float(self, node: fx.Node) -> Argument:
        return self.reference[self.counterparts[node.name]]

    def _weight(self, node: fx.Node) -> Similarity | None:
        return compare_weight(self.gm.get_submodule(str(node.target))) if node.op == "call_module" else None


# ---- without a graph: the calls of the layers, side by side


def _compare_modules(float_model: nn.Module, quantized: nn.Module, inputs: object, progress: bool) -> Comparison:
    """Compare the quantized layers of a model without a graph with the float model's (see `compare`)."""
    args, kwargs = call_arguments(quantized, inputs, "compare: inputs do")
    names = _layers(float_model, quantized)
    followers = _batch_norms(float_model, quantized)
    with torch.no_grad(), evaluating(float_model), evaluating(quantized), freeze_ranges(quantized):
        with (
            random_state_kept(quantized),
            naming_misfits(float_model, inputs, "compare: inputs do"),
            watching(float_model, [*names, *followers.values()]) as float_calls,
        ):
            expected = float_model(*args, **kwargs)
        with random_state_kept(quantized), watching(quantized, names) as calls:
            result = quantized(*args, **kwargs)
        with progress_bar("compare", "layers", progress, names) as bar:
            layers: list[LayerComparison] = []
            for name in bar:
                layers += _compared(quantized, name, followers.get(name, name), float_calls, calls)
                note_worst(bar, layers)
    return Comparison.of(layers, [expected], [result])


def _layers(float_model: nn.Module, quantized: nn.Module) -> list[str]:
    """Return the names of the quantized layers in both models."""
    for name, part in quantized.named_modules():
        if isinstance(part, QuantizedGraphModule):
            raise ValueError(
                f"compare: submodule {name!r} was prepared separately and has its own graph; compare it with {name!r} of the "
                "float model, on its own inputs."
            )
    known = modules_by_name(float_model)
    names = [line.name for line in quantization_report(quantized).quantized]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"compare: the float model has no {', '.join(missing)}; pass the float model that was given to "
            "qtoolkit.quant_modules.replace."
        )
    return names


def _batch_norms(float_model: nn.Module, quantized: nn.Module) -> dict[str, str]:
    """Return the batch norms of the float model that quantized layers include, by the layers' names."""
    known = modules_by_name(float_model)
    pairs = ((head, name) for head, *rest in chains_of(quantized) for name in rest)
    return {head: name for head, name in pairs if name in known and is_batch_norm(known[name])}


def _compared(quantized: nn.Module, name: str, last: str, float_calls: Calls, calls: Calls) -> list[LayerComparison]:
    """Return the comparison of a layer; its float counterpart ends with the module `last`. Empty if it is not called."""
    counts = len(float_calls[name]), len(float_calls[last]), len(calls[name])
    if len(set(counts)) > 1:
        raise ValueError(
            f"compare: layer {name!r} is called {counts[0]} times in the float model and {counts[2]} times in the quantized "
            "model, so forward branches on values; pass inputs for which both models take the same branch."
        )
    return [compare_calls(quantized, name, last, float_calls, calls)] if calls[name] else []
