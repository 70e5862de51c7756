"""Plan: note of each op whether it is quantized, and why not. And run the prepared model once, so that it fails early."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.config import QConfigMapping
from qtoolkit.graph.fuse import calls_of, reason_apart
from qtoolkit.graph.insert import is_quantizer, role_of
from qtoolkit.graph.kinds import OTHER, WEIGHTED_KINDS, kind_of, module_of
from qtoolkit.graph.module import Plan, QuantizedGraphModule, Status
from qtoolkit.graph.swap import config_of, reason_float
from qtoolkit.modes import evaluating
from qtoolkit.nn import LinkedBatchNorm
from qtoolkit.switches import disable_quantization


def run(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> QuantizedGraphModule:
    """Keep in the model's plan the backend, and of each op its status with the reason, for quantization_report."""
    calls = calls_of(gm)
    nodes = [node for node in gm.graph.nodes if not is_quantizer(node)]
    gm.plan = Plan(backend, {node.name: _status(node, calls, backend, mapping) for node in nodes})
    return gm


def _status(
    node: fx.Node, calls: Mapping[str, int], backend: Backend, mapping: QConfigMapping | None
) -> tuple[Status, str]:
    kind, role = kind_of(node), role_of(node, backend)
    if kind == "batch_norm":
        return _status_of_batch_norm(node, calls, backend, mapping)
    if kind in (*WEIGHTED_KINDS, "embedding", "attention"):
        reason = reason_float(node, backend, mapping)
        return ("quantized", "") if reason is None else ("float", f"float: {reason}")
    if role == "transparent":
        return "transparent", ""
    if role in ("compute", "merge"):
        qconfig = config_of(node, backend, mapping)
        if qconfig is None or qconfig.activation is None:
            return "float", "float: the qconfig_mapping says so"
        return "quantized", ""
    return _status_of_float(kind, backend)


def _status_of_float(kind: str, backend: Backend) -> tuple[Status, str]:
    if kind == "relu":
        return "transparent", ""
    what = "unknown to qtoolkit" if kind == OTHER else f"a {kind}"
    return "float", f"float: {what}, which {backend.name} computes in float"


def _status_of_batch_norm(
    node: fx.Node, calls: Mapping[str, int], backend: Backend, mapping: QConfigMapping | None
) -> tuple[Status, str]:
    if node.op == "call_module" and isinstance(module_of(node), LinkedBatchNorm):
        return "quantized", "folded into the layer before it"
    source = node.all_input_nodes[0]
    behind = kind_of(source) in WEIGHTED_KINDS
    reason = reason_apart(source, node, calls, backend, mapping) if behind else "no layer right before it"
    return "float", f"float: a batch norm that cannot be folded ({reason})"


def try_out(gm: QuantizedGraphModule, example_inputs: Any) -> None:
    """Run a prepared model on example inputs, with quantizers off, leaving its state as it was."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    with torch.no_grad(), evaluating(gm), disable_quantization(gm):
        gm(*inputs)
