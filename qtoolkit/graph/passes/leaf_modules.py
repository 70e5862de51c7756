"""Quantize the layers inside leaf modules, which tracing does not go into, by module replacement."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from qtoolkit.config import QConfig
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.plan import Plan
from qtoolkit.layer_rules import LayerDecision, LayerRules
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.replacement import modules_in, replace_layers
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.verdicts import BY_CONFIG, Cause, Status, Verdict


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Quantize the layers inside leaf modules. The plan says which, and why others stay float."""
    calls = gm.graph.find_nodes(op="call_module")
    nodes = [node for node in calls if _is_leaf(module_of(node), rules.table)]
    if not nodes:
        return gm
    names = sorted({str(node.target) for node in nodes})
    replaced: dict[str, LayerDecision] = {}

    def decide(name: str, module: nn.Module) -> LayerDecision:
        leaf = next(leaf for leaf in names if name == leaf or name.startswith(f"{leaf}."))
        return _decide(module, f"inside the leaf module {leaf!r}", rules)

    def choose(name: str, module: nn.Module, qat_type: type[Any]) -> QConfig | None:
        replaced[name] = decide(name, module)
        return replaced[name].qconfig

    replace_layers(gm, names, choose, rules.table)
    layers = {name: module for name, module in modules_in(gm, names) if _is_layer(module)}
    verdicts = {n: (replaced.get(n) or decide(n, module)).verdict for n, module in layers.items()}
    plan = plan_in(gm) or Plan(rules.backend)
    status = {**plan.status, **{node.name: _summary(str(node.target), verdicts) for node in nodes}}
    gm.plan = dataclasses.replace(plan, status=status, inside={**plan.inside, **verdicts})
    return gm


def _decide(module: nn.Module, where: str, rules: LayerRules) -> LayerDecision:
    """Return how a layer inside a leaf module is quantized."""
    quantized = Verdict.quantized(Cause.REPLACED, f"by module replacement, {where}")
    if isinstance(module, QuantModule):
        return LayerDecision(None, quantized)
    if type(module) not in rules.table:
        why = f"{where}, where only layers with weights are quantized"
        return LayerDecision(None, Verdict.left_float(Cause.NO_QAT_TYPE, why))
    decision = rules.decide(rules.of_module(module), module)
    if decision.qconfig is None or decision.qconfig.weight is None:
        return LayerDecision(None, decision.verdict if decision.qconfig is None else BY_CONFIG)
    return LayerDecision(decision.qconfig, quantized)


def _is_leaf(module: nn.Module, table: Mapping[type[nn.Module], object]) -> bool:
    is_layer = isinstance(module, QuantModule | Quantizer) or type(module) in table or is_batch_norm(module)
    return not is_layer and any(True for _ in module.children())


def _is_layer(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children())
    return isinstance(module, QuantModule) or not (has_parts or isinstance(module, Quantizer))


def _summary(name: str, verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on a leaf module by the verdicts on its layers."""
    layers = [verdict.status for layer, verdict in verdicts.items() if layer.startswith(f"{name}.")]
    count = layers.count(Status.QUANTIZED)
    if not count:
        return Verdict.left_float(Cause.NO_QAT_TYPE, "a leaf module in which no layer is quantized")
    text = f"a leaf module: {count} of {len(layers)} layers in it are quantized, by module replacement"
    return Verdict.quantized(Cause.CONTAINS, text)
