"""lint(): which quantized edges of a prepared or converted model would break a fusion on its target."""

from collections.abc import Iterator

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.record import verdict_now
from qtoolkit.graph.plan import Cause, Plan, Status
from qtoolkit.lint.findings import Finding, Rule, broken
from qtoolkit.lint.layers import ADVICE, LAYERS
from qtoolkit.lint.ops import Layer, Op, WeightGrid
from qtoolkit.lint.placement import PLACEMENT
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.nodes import (
    has_float_weight,
    is_quantizer,
    is_weight_quantizer,
    kind_of,
    module_of,
    name_of,
    owns_weight,
    parameters_in,
    tensor_inputs,
)
from qtoolkit.op_kinds.rules import argument
from qtoolkit.quantizers.quantizer import Quantizer


def lint(model: QuantizedGraphModule, advice: bool = False) -> tuple[Finding, ...]:
    """Check the quantizers of a model against the rules of its backend.

    The rules are those of `qtoolkit.lint`, which `qtoolkit.export.lint` checks on files too.

    Args:
        model: What `qtoolkit.prepare` or `qtoolkit.convert` returned, also with a graph that was changed afterwards.
        advice: Also list the ops that the target's own quantizer leaves in float, because they are not faster in integers
            (`qtoolkit.lint.layers`). `prepare` quantizes them.

    Returns:
        One finding for each edge or op that breaks a rule, in the order of the graph. Without advice, an unchanged graph
        breaks none.

    Raises:
        TypeError: The model was not prepared.

    Example:
        >>> from qtoolkit.graph.lint import lint
        >>> lint(qt.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())))
        ()
    """
    if not isinstance(model, QuantizedGraphModule) or model.plan is None:
        raise TypeError(
            f"lint: model must be what qtoolkit.prepare or qtoolkit.convert returned, got {type(model).__name__}."
        )
    backend = model.plan.backend
    rules = (*PLACEMENT, _put_in(model.plan), *LAYERS, *(ADVICE[name] for name in backend.advice if advice))
    return broken(rules, _ops_of(model.graph), backend)


def _ops_of(graph: fx.Graph) -> list[Op]:
    ops: dict[fx.Node, Op] = {}
    parameters = parameters_in(graph)
    for node in graph.nodes:
        quantizer = is_quantizer(node)
        sources = node.all_input_nodes[:1] if quantizer else tensor_inputs(node)
        ops[node] = Op(
            name_of(node),
            kind_of(node),
            [ops[source] for source in sources],
            grid=str(node.target) if quantizer else None,
            of_weight=is_weight_quantizer(node),
            layer=_layer(node, parameters),
            node=node,
        )
    for node, op in ops.items():
        op.users = [ops[user] for user in node.users]
    return list(ops.values())


def _layer(node: fx.Node, parameters: set[fx.Node]) -> Layer | None:
    """Return what is known about a layer, or about a function that takes a weight."""
    if owns_weight(node):
        return _layer_of_module(module_of(node), None if has_float_weight(node) else _weight_grid(node))
    weights = [source for source in node.all_input_nodes if is_weight_quantizer(source)]
    if not weights and (not kind_of(node).weight_argument or parameters.isdisjoint(tensor_inputs(node))):
        return None
    return Layer(_weight_grid(weights[0]) if weights else None, groups=argument(node, 6, "groups", 1))


def _layer_of_module(module: nn.Module, weight: WeightGrid | None) -> Layer:
    own = getattr(module, "weight", None)
    sizes = () if own is None else tuple(own.shape)
    groups = getattr(module, "groups", 1)
    if isinstance(
        module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Conv1d | nn.Conv2d | nn.Conv3d
    ):
        return Layer(weight, module.in_channels, module.out_channels, groups, tuple(module.kernel_size))
    return Layer(weight, sizes[1], sizes[0], groups) if len(sizes) == 2 else Layer(weight, groups=groups)


def _weight_grid(node: fx.Node) -> WeightGrid | None:
    module = module_of(node)
    quantizers = module.weight_quantizers().values() if isinstance(module, QuantModule) else [module]
    specs = [quantizer.spec for quantizer in quantizers if isinstance(quantizer, Quantizer)]
    return WeightGrid(specs[0].bits, specs[0].axis, specs[0].group_size is not None) if specs else None


def _put_in(plan: Plan) -> Rule:
    """Return the rule that no quantized op was replaced after the model was prepared."""

    def check(op: Op, backend: Backend) -> Iterator[Finding]:
        node = op.node
        if op.is_quantizer or node.op not in ("call_module", "call_function", "call_method"):
            return
        verdict = verdict_now(node, plan)
        if verdict.cause is Cause.PUT_IN and plan.status.get(node.name, verdict).status is Status.QUANTIZED:
            yield Finding(
                op.name,
                f"the plan quantizes it, and it is {verdict.text}.",
                "Make that change in the float model, and call qtoolkit.prepare on it.",
            )

    return Rule("put-in", check, "the plan of the model")
