"""Plan: note of each op whether it is quantized, and why not. And run the prepared model once, so that it fails early."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfigMapping
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.link_batch_norms import calls_of, reason_apart
from qtoolkit.graph.passes.swap import reason_float
from qtoolkit.graph.placement.roles import HEADS, Roles, is_quantizer, is_weight_quantizer
from qtoolkit.graph.placement.traversal import quantizer_behind
from qtoolkit.graph.plan import Plan, Status
from qtoolkit.model_inputs import split
from qtoolkit.modes import evaluating
from qtoolkit.nn import REPLACED_MODULES, LinkedBatchNorm
from qtoolkit.op_kinds.nodes import OTHER, WEIGHTED_KINDS, kind_of, module_of, tensor_inputs
from qtoolkit.op_kinds.recorded import BOOKKEEPING
from qtoolkit.op_kinds.table import ACTIVATIONS
from qtoolkit.quantizers.switches import disable_quantization
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

BY_RULE = "float: the qconfig_mapping says so"
HIDES_LAYERS = (
    "float: a function that weights are handed to and tracing stopped at: pass example_inputs, or make it a module"
)


def run(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> QuantizedGraphModule:
    """Add to the model's plan the status of each op with the reason, for quantization_report."""
    plan = gm.plan or Plan(backend)
    roles, calls = Roles(gm, backend, mapping), calls_of(gm)
    nodes = [n for n in gm.graph.nodes if not is_quantizer(n)]
    gm.plan = replace(plan, status={**{n.name: _status(n, roles, calls) for n in nodes}, **plan.status})
    return gm


def _status(node: fx.Node, roles: Roles, calls: Mapping[str, int]) -> tuple[Status, str]:
    kind, role = kind_of(node), roles[node]
    if any(is_weight_quantizer(source) for source in node.all_input_nodes):
        return "quantized", ""
    if kind in (*WEIGHTED_KINDS, "attention", "embedding") and node.op == "call_module":
        reason = reason_float(node, roles.backend, roles.mapping)
        return ("quantized", "") if reason is None else ("float", f"float: {reason}")
    if kind == "batch_norm" and role != "compute":
        return _status_of_batch_norm(node, roles, calls)
    if node in roles.head:
        return "fused", f"one op with {roles.head[node].name}"
    if role == "transparent":
        return "transparent", ""
    return _status_of_head(node, roles) if role in HEADS else _status_of_float(node, roles)


def _status_of_head(node: fx.Node, roles: Roles) -> tuple[Status, str]:
    if roles[node] == "concat":
        on_grid = quantizer_behind(node, roles.backend) is not None
        return ("quantized", "") if on_grid else ("float", "float: no quantized op takes its output")
    if any(quantizer_behind(source, roles.backend) is not None for source in tensor_inputs(node)):
        return "quantized", ""
    qconfig = roles.config(node)
    ruled_out = qconfig is None or qconfig.activation is None or (qconfig.weight is None and roles.weights_of(node))
    return "float", BY_RULE if ruled_out else "float: none of its inputs is quantized"


def _status_of_float(node: fx.Node, roles: Roles) -> tuple[Status, str]:
    if node.op in ("placeholder", "output", "get_attr"):
        return "float", ""
    if node.op == "call_module" and isinstance(module_of(node), TensorQuantizer):
        return "quantized", "a quantizer of the model's own"
    rule = roles.rule(node)
    if rule is not None and (rule.qconfig is None or rule.qconfig.activation is None):
        return "float", BY_RULE
    kind = kind_of(node)
    if kind in ACTIVATIONS:
        return "float", f"float: a {kind} that no quantized op comes right before"
    if kind == OTHER and node in roles.parameters:
        return "float", "float: computed from parameters alone"
    if kind == OTHER and _hides_layers(node):
        return "float", HIDES_LAYERS
    if kind in (OTHER, "recurrent") and node.op == "call_module" and _has_weights(module_of(node)):
        module = type(module_of(node))
        by_replacement = " in a graph: qtoolkit.quant_modules.replace has one" if module in REPLACED_MODULES else ""
        return "float", f"float: no QAT module for {module.__name__}{by_replacement}"
    what = "unknown to qtoolkit" if kind == OTHER else f"a {kind}"
    return "float", f"float: {what}, which {roles.backend.name} computes in float"


def _hides_layers(node: fx.Node) -> bool:
    """Return whether a Python function is given weights."""
    sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
    gm = node.graph.owning_module
    if gm is None or not isinstance(node.target, FunctionType) or node.target in BOOKKEEPING:
        return False
    values = [attrgetter(str(source.target))(gm) for source in sources]
    return any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in values)


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _status_of_batch_norm(node: fx.Node, roles: Roles, calls: Mapping[str, int]) -> tuple[Status, str]:
    if node.op == "call_module" and isinstance(module_of(node), LinkedBatchNorm):
        return "quantized", "folded into the layer before it"
    source = node.all_input_nodes[0]
    behind = kind_of(source) in WEIGHTED_KINDS
    reason = reason_apart(source, node, calls, roles.backend, roles.mapping) if behind else "no layer right before it"
    return "float", f"float: a batch norm that cannot be folded ({reason})"


def try_out(gm: QuantizedGraphModule, example_inputs: Any) -> None:
    """Run a prepared model on example inputs, with quantizers off, leaving its state as it was."""
    args, kwargs = split(example_inputs)
    with torch.no_grad(), evaluating(gm), disable_quantization(gm):
        gm(*args, **kwargs)
