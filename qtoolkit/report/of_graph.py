"""The report of a model with a graph."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from torch import fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.layer_quantizers import INPUT, ITSELF, LayerQuantizer, layer_quantizers
from qtoolkit.graph.module_calls import number_of
from qtoolkit.graph.nodes import (
    is_quantizer,
    is_weight_quantizer,
    kind_of,
    kind_of_module,
    name_of,
    quantizes_its_input,
    tensor_inputs,
)
from qtoolkit.graph.placement.traversal import QuantizersBehind
from qtoolkit.graph.program import calls_now
from qtoolkit.graph.program import products as products_in
from qtoolkit.graph.verdict_now import is_reported, verdict_now
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.rules import called_module, module_of
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.report.lines import LayerLine, QuantizationReport, TensorLine, spec_of, training_of, weight_of
from qtoolkit.shared_modules import first_names, modules_by_name
from qtoolkit.verdicts import Cause, Status, Verdict

NOT_PLANNED = Verdict.left_float(Cause.NOT_AN_OP, "not planned yet")
NOT_CALLED = Verdict.left_float(
    Cause.NOT_CALLED, "forward did not call it when prepare traced the model (its mode and example inputs)"
)


def report_of_graph(model: QuantizedGraphModule) -> QuantizationReport:
    """Return the report of a prepared or converted model."""
    nodes = list(model.graph.nodes)
    quantizers = [node for node in nodes if is_quantizer(node) and not is_weight_quantizer(node)]
    sources: dict[str, list[str]] = defaultdict(list)
    for node in quantizers:
        sources[str(node.target)].append(node.all_input_nodes[0].name)
    every = layer_quantizers(model)
    held = [quantizer for quantizer in every if not quantizer.is_weights]
    trained = _trained(model)
    behind = None if (plan := plan_in(model)) is None else QuantizersBehind(plan.backend)
    layers = [_layer_line(model, node, every, trained.get(node, ""), behind) for node in nodes if is_reported(node)]
    tensors = [_tensor_line(model, node, sources[str(node.target)]) for node in quantizers]
    layers += _lines_inside(model)
    layers += _lines_not_called(model)
    for quantizer in held:
        sources[quantizer.name] += [source for source in quantizer.sources if source not in sources[quantizer.name]]
    tensors += dict.fromkeys(
        line for quantizer in held for line in _tensor_lines_of(quantizer, sources[quantizer.name])
    )
    printed, calls, times = dict[str, str](), dict[str, int](), Counter[str]()
    for node in nodes:
        printed[node.name] = name_of(node)
        times[name_of(node)] += 1
        calls[node.name] = times[name_of(node)]
    return QuantizationReport(tuple(layers), tuple(line.renamed(printed, calls) for line in tensors))


def _trained(model: QuantizedGraphModule) -> dict[fx.Node, str]:
    """Return how ops that are no layers compute in training."""
    by_torch = model.ops_in_training() is None
    calls = {
        call.first: "computed by torch: as asked" if by_torch else call.sentence()
        for call in calls_now(model, model.calls)
    }
    named = [(node, model.products.get(node.name)) for node in model.graph.nodes]
    return {**calls, **{node: products_in.sentence(node, product) for node, product in named if product is not None}}


def _layer_line(
    model: QuantizedGraphModule,
    node: fx.Node,
    held: Sequence[LayerQuantizer],
    trained: str,
    sources: QuantizersBehind | None,
) -> LayerLine:
    plan = plan_in(model)
    verdict = NOT_PLANNED if plan is None else verdict_now(node, plan)
    how = None if plan is None else plan.computed.get(node.name)
    if how is not None:
        verdict = replace(verdict, text="; ".join(filter(None, (verdict.text, str(how)))))
    behind = [] if sources is None else [sources[n] for n in tensor_inputs(node)]
    weights = [str(n.target) for n in behind if n is not None and is_weight_quantizer(n)]
    inputs = tuple(str(n.target) for n in behind if n is not None and not is_weight_quantizer(n))
    inputs += (f"{node.target}.input_quantizer",) if quantizes_its_input(node) else ()
    is_layer = isinstance(called_module(node), QuantModule)
    own = [quantizer.name for quantizer in held if is_layer and quantizer.layer == node.target]
    weight = ", ".join(spec_of(model.get_submodule(name)) for name in weights)
    training, in_float = training_of(module_of(node), number_of(node)) if is_layer else (trained, None)
    return LayerLine(
        name_of(node),
        str(kind_of(node)),
        weight_of(module_of(node)) if is_layer else weight,
        inputs,
        verdict,
        tuple(dict.fromkeys((*weights, *own, *inputs))),
        training,
        in_float if how is None else how.cause,
    )


def _tensor_line(model: QuantizedGraphModule, node: fx.Node, sources: list[str]) -> TensorLine:
    source = node.all_input_nodes[0].name
    consumers = tuple(name_of(user) for user in node.users)
    others = tuple(name for name in sources if name != source)
    return TensorLine(str(node.target), source, consumers, spec_of(model.get_submodule(str(node.target))), others)


def _lines_inside(model: QuantizedGraphModule) -> list[LayerLine]:
    """Return the lines of the layers inside leaf modules."""
    names = first_names(model)
    inside = {} if (plan := plan_in(model)) is None else plan.inside
    modules = modules_by_name(model)
    return [_line_inside(name, modules[name], inside[name], names) for name in inside if name in modules]


def _lines_not_called(model: QuantizedGraphModule) -> list[LayerLine]:
    """Return the lines of the layers that no node calls and whose parameters no op takes."""
    called = [model.get_submodule(str(node.target)) for node in model.graph.nodes if node.op == "call_module"]
    reached = {part for module in called for part in module.modules()}
    taken = {id(attrgetter(str(node.target))(model)) for node in model.graph.nodes if node.op == "get_attr"}
    lines = []
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        apart = name and module not in reached and not isinstance(module, Quantizer)
        if apart and own and taken.isdisjoint(own):
            lines.append(LayerLine(name, str(kind_of_module(module)), weight_of(module), (), NOT_CALLED))
    return lines


def _line_inside(name: str, layer: nn.Module, verdict: Verdict, names: Mapping[nn.Module, str]) -> LayerLine:
    quantizers = {path: names[quantizer] for path, quantizer in named_quantizers(layer).items()}
    if verdict.status is Status.QUANTIZED and not quantizers:
        verdict = Verdict.put_in(type(layer).__name__)
    inputs = (quantizers[INPUT],) if INPUT in quantizers else ()
    kind = str(kind_of_module(layer))
    return LayerLine(name, kind, weight_of(layer), inputs, verdict, tuple(quantizers.values()), *training_of(layer))


def _tensor_lines_of(held: LayerQuantizer, sources: list[str]) -> list[TensorLine]:
    """Return the lines of the tensors that a layer quantizes itself with one quantizer, which others may share."""
    how = spec_of(held.quantizer)
    consumers = held.consumers if held.attribute == ITSELF else (held.layer,)
    return [
        TensorLine(held.name, source, consumers, how, tuple(name for name in sources if name != source))
        for source in held.sources
    ]
