"""The verdict on an op as a model is now: its plan's, unless the op was changed since."""

import operator

from torch import fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.nodes import chooses_by_mode, is_quantizer, kind_of, name_of, owns_weight, tensor_inputs
from qtoolkit.graph.placement.traversal import QuantizersBehind
from qtoolkit.graph.plan import Plan
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.recorded import BOOKKEEPING, is_mode
from qtoolkit.op_kinds.rules import called_module, is_number
from qtoolkit.op_kinds.table import OTHER
from qtoolkit.verdicts import Cause, Status, Verdict


def verdict_now(node: fx.Node, plan: Plan) -> Verdict:
    """Return the verdict on an op of a prepared or converted model: the plan's, unless the op was changed since."""
    kind, verdict = kind_of(node), plan.status.get(node.name)
    module = called_module(node)
    if module is not None and any(isinstance(part, QuantModule) for part in module.modules()):
        return Verdict.quantized() if verdict is None or verdict.status is Status.FLOAT else verdict
    lost = owns_weight(node) and verdict is not None and verdict.cause is Cause.COMPUTED
    if verdict is not None and not lost and plan.kinds.get(node.name) == str(kind):
        return verdict
    if plan.backend.quantizes(kind) and not kind.has_weight:
        behind = QuantizersBehind(plan.backend)
        if any(behind[source] is not None for source in tensor_inputs(node)):
            return Verdict.quantized()
    return Verdict.put_in(type(module).__name__ if module is not None else str(kind))


def is_reported(node: fx.Node) -> bool:
    """Return whether a node is an op that reports have a line for: it computes tensors, and is no quantizer."""
    is_op = node.op in ("call_module", "call_function", "call_method")
    arranges = (kind_of(node) is OTHER and _only_arranges(node)) or chooses_by_mode(node)
    bookkeeping = arranges or is_number(node) or is_mode(node)
    return is_op and not is_quantizer(node) and not bookkeeping


def _only_arranges(node: fx.Node) -> bool:
    """Return whether an op without a row in the table only selects items or builds tuples."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], int | str)
    makes_tuple = isinstance(node.target, type) and issubclass(node.target, tuple)
    return node.target in BOOKKEEPING or makes_tuple


def ops_put_in(model: nn.Module) -> list[str]:
    """Return the names of the ops of a model that compute in float because they came into it after it was quantized."""
    return [
        f"{prefix}.{name_of(node)}" if prefix else name_of(node)
        for prefix, part in model.named_modules()
        if isinstance(part, QuantizedGraphModule) and plan_in(part) is not None
        for node in part.graph.nodes
        if is_reported(node) and verdict_now(node, part.plan).cause is Cause.PUT_IN
    ]
