"""Record a verdict on each op in the plan."""

from dataclasses import replace
from operator import attrgetter
from types import FunctionType

from torch import fx, nn

from qtoolkit.backends import QUANTIZED_ROLES
from qtoolkit.errors import with_article
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.nodes import is_discrete, is_quantizer, is_weight_quantizer, kind_of, name_of, tensor_inputs
from qtoolkit.graph.passes.fold_ahead import why_not_ahead
from qtoolkit.graph.passes.link_batch_norms import NO_LAYER, Links
from qtoolkit.graph.placement.roles import Roles
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.graph.placement.traversal import QuantizersBehind
from qtoolkit.graph.plan import Plan
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import LinkedBatchNorm, QuantModule
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.recorded import BOOKKEEPING
from qtoolkit.op_kinds.rules import called_module, module_of
from qtoolkit.op_kinds.table import NO_OPS, OTHER
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.verdicts import BY_CONFIG, FOLDED, Cause, Status, Verdict

FROM_PARAMETERS = Verdict.left_float(Cause.TARGET, "computed from parameters alone")
IN_TRAINING = Verdict.left_float(Cause.TARGET, "only training mode takes it, and no target computes it")
NOT_TRACED = "a function that takes weights and is not traced"


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Add to the model's plan the verdict on each op, for quantization_report."""
    plan = plan_in(gm) or Plan(rules.backend)
    roles, links, behind = Roles(gm.graph, rules), Links(gm.graph, rules), QuantizersBehind(rules.backend)
    nodes = [n for n in gm.graph.nodes if not is_quantizer(n)]
    status = {**{n.name: _verdict(n, roles, links, behind) for n in nodes}, **plan.status}
    gm.plan = replace(plan, status=status, kinds={n.name: str(kind_of(n)) for n in nodes})
    return gm


def _verdict(node: fx.Node, roles: Roles, links: Links, behind: QuantizersBehind) -> Verdict:
    kind, role = kind_of(node), roles[node]
    if facts_of(node).in_training and not kind.has_weight:
        return IN_TRAINING
    if any(is_weight_quantizer(source) for source in node.all_input_nodes):
        return Verdict.quantized()
    if kind.has_weight and kind is not OTHER and node.op == "call_module":
        return _verdict_on_layer(node, roles.rules)
    if kind.normalizes_batches and role != "compute":
        return _verdict_on_batch_norm(node, links)
    if node in roles.unit:
        return Verdict(Status.FUSED, Cause.JOINED, f"fused with {name_of(roles.unit[node])}")
    if role == "transparent":
        return Verdict(Status.TRANSPARENT, Cause.MOVES)
    if roles.is_behind_codes(node):
        return Verdict.left_float(Cause.TARGET, f"{with_article(kind)}, which {roles.backend.name} computes in float")
    return _verdict_by_inputs(node, roles, behind) if role in QUANTIZED_ROLES else _verdict_on_float(node, roles)


def _verdict_on_layer(node: fx.Node, rules: LayerRules) -> Verdict:
    module = module_of(node)
    if isinstance(module, QuantModule):
        return Verdict.quantized()
    if type(module) not in rules.table:
        return Verdict.left_float(Cause.NO_QAT_TYPE, "no QAT module for its type")
    decision = rules.decide(rule_of_node(node, rules), module)
    return BY_CONFIG if decision.qconfig is not None else decision.verdict


def _verdict_by_inputs(node: fx.Node, roles: Roles, behind: QuantizersBehind) -> Verdict:
    if roles[node] == "concat":
        if behind[node] is not None:
            return Verdict.quantized()
        return Verdict.left_float(Cause.NOT_QUANTIZED_AROUND, "no quantized op takes its output")
    if any(behind[source] is not None for source in tensor_inputs(node)):
        return Verdict.quantized()
    rule = roles.rule(node)
    if rule.qconfig is None:
        return rule.left
    if rule.qconfig.activation is None or (rule.qconfig.weight is None and roles.weights_of(node)):
        return BY_CONFIG
    return Verdict.left_float(Cause.NOT_QUANTIZED_AROUND, "none of its inputs is quantized")


def _verdict_on_float(node: fx.Node, roles: Roles) -> Verdict:
    if node.op in NO_OPS:
        return Verdict(Status.FLOAT, Cause.NOT_AN_OP)
    module = called_module(node)
    if isinstance(module, Quantizer):
        return Verdict.quantized(Cause.OWN_QUANTIZER, "a quantizer of the model's own")
    rule, kind = roles.rule(node), kind_of(node)
    if not rule.is_general and (rule.qconfig is None or rule.qconfig.activation is None):
        return rule.left
    if node in roles.parameters:
        return FROM_PARAMETERS
    if kind.activation:
        return Verdict.left_float(Cause.TARGET, f"{with_article(kind)} with no quantized op right before it")
    if kind is OTHER and _takes_weights(node):
        return Verdict.left_float(Cause.NO_QAT_TYPE, f"{NOT_TRACED}: {_remedy(node)}")
    has_weights = module is not None and any(parameter.dim() > 1 for parameter in module.parameters())
    if has_weights and kind is OTHER:
        return Verdict.left_float(Cause.NO_QAT_TYPE, f"no QAT module for {type(module).__name__}")
    if kind is not OTHER and not kind.moves and any(map(is_discrete, tensor_inputs(node))):
        without_range = "integers, booleans (such as a mask) or complex numbers"
        return Verdict.left_float(Cause.TARGET, f"{with_article(kind)} that takes {without_range}")
    what = "an op that qtoolkit does not know" if kind is OTHER else with_article(kind)
    return Verdict.left_float(Cause.TARGET, f"{what}, which {roles.backend.name} computes in float")


def _remedy(node: fx.Node) -> str:
    plan, remedy = plan_in(node.graph.owning_module), "make it a module"
    return remedy if plan is not None and plan.tracing.measured else f"pass example_inputs, or {remedy}"


def _takes_weights(node: fx.Node) -> bool:
    """Return whether a Python function that is not traced takes weights."""
    sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
    gm = node.graph.owning_module
    if gm is None or not isinstance(node.target, FunctionType) or node.target in BOOKKEEPING:
        return False
    values = [attrgetter(str(source.target))(gm) for source in sources]
    return any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in values)


def _verdict_on_batch_norm(node: fx.Node, links: Links) -> Verdict:
    if isinstance(called_module(node), LinkedBatchNorm):
        return FOLDED
    reason = links.why_not(node)
    if reason == NO_LAYER:
        reason = f"{reason}; {why_not_ahead(node, links.calls, links.rules)}"
    return Verdict.left_float(Cause.NOT_FOLDED, f"a batch norm that cannot be folded ({reason})")
