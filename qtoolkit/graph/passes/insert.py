"""Insert quantizers: one on each tensor that is to be quantized, shared where concats tie tensors; weights of functions too."""

from dataclasses import replace

import torch
from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfigMapping
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.layer_quantizers import layer_edges
from qtoolkit.graph.placement import decide
from qtoolkit.graph.placement.decide import Decisions, Group, Want
from qtoolkit.graph.placement.roles import Roles, is_quantizer
from qtoolkit.graph.plan import Edge, Plan, Status
from qtoolkit.quantizers.tensor_quantizer import HOLDER, WEIGHT_HOLDER, TensorQuantizer
from qtoolkit.quantizers.weights import weight_quantizer


def run(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> QuantizedGraphModule:
    """Insert a quantizer on every tensor that the backend wants quantized, one for all its consumers.

    The quantizer of node `relu` is the submodule `activation_quantizers.relu`; the one that the inputs of the concat `cat`
    share is `activation_quantizers.cat`; that of the weight of the function `linear` is `weight_quantizers.linear`. Where
    consumers ask for different specs, the one with most bits holds. Nothing is inserted where quantizers are already.
    The plan gets every edge.

    Raises:
        ValueError: A spec does not fit a function's weight.
    """
    if any(is_quantizer(node) for node in gm.graph.nodes):
        return gm
    decisions = decide.run(Roles(gm, backend, mapping), gm.graph)
    _insert_all(gm, decisions)
    edges = [edge for group in decisions.groups for edge in _edges_of(group)]
    edges += [_weight_edge(want) for want in decisions.weights] + layer_edges(gm)
    plan = gm.plan or Plan(backend)
    left: dict[str, tuple[Status, str]] = {name: ("float", reason) for name, reason in decisions.left.items()}
    gm.plan = replace(plan, status={**left, **plan.status}, edges=tuple(edges))
    gm.graph.lint()
    gm.recompile()
    return gm


def _insert_all(gm: QuantizedGraphModule, decisions: Decisions) -> None:
    device = next((p.device for p in gm.parameters()), torch.device("cpu"))
    for holder, wanted in ((HOLDER, decisions.groups), (WEIGHT_HOLDER, decisions.weights)):
        if wanted:
            gm.add_module(holder, nn.Module())
    values = _values_of(gm, [want.anchor for want in decisions.weights])
    for want in decisions.weights:
        _insert_weight(gm, want, values[want.anchor])
    for group in decisions.groups:
        _insert_group(gm, group, device)


def _insert_group(gm: QuantizedGraphModule, group: Group, device: torch.device) -> None:
    target = f"{HOLDER}.{group.name}"
    quantizer = TensorQuantizer(group.spec, name=target, inserted=True)
    gm.add_submodule(target, quantizer.to(device))
    quantizer.train(gm.training)
    for anchor in group.anchors:
        on_the_way = {n for want in group.wants if want.anchor is anchor for n in (*want.through, want.consumer)}
        users = [user for user in anchor.users if user in on_the_way]
        with gm.graph.inserting_after(anchor):
            node = gm.graph.call_module(target, (anchor,))
        for user in users:
            user.replace_input_with(anchor, node)


def _insert_weight(gm: QuantizedGraphModule, want: Want, weight: torch.Tensor) -> None:
    target = f"{WEIGHT_HOLDER}.{want.consumer.name}"
    group = decide.conv_groups(want.consumer, want.spec)
    quantizer = weight_quantizer(weight, want.spec, want.consumer.name, group, target, inserted=True)
    gm.add_submodule(target, quantizer)
    quantizer.train(gm.training)
    with gm.graph.inserting_before(want.consumer):
        node = gm.graph.call_module(target, (want.anchor,))
    want.consumer.replace_input_with(want.anchor, node)


def _values_of(gm: QuantizedGraphModule, nodes: list[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """Compute nodes that depend on parameters alone."""
    interpreter = fx.Interpreter(gm, garbage_collect_values=False)
    waiting, needed = list(nodes), set()
    while waiting:
        node = waiting.pop()
        needed.add(node)
        waiting += [source for source in node.all_input_nodes if source not in needed]
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node in needed:
                interpreter.env[node] = interpreter.run_node(node)
    return {node: interpreter.env[node] for node in nodes}


def _edges_of(group: Group) -> list[Edge]:
    target = f"{HOLDER}.{group.name}"
    return [Edge(want.anchor.name, want.consumer.name, target, group.spec, want.why) for want in group.wants]


def _weight_edge(want: Want) -> Edge:
    source = str(want.anchor.target) if want.anchor.op == "get_attr" else want.anchor.name
    return Edge(source, want.consumer.name, f"{WEIGHT_HOLDER}.{want.consumer.name}", want.spec, want.why)
