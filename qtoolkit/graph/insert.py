"""Insert activation quantizers: read roles, decide all edges once, then put one quantizer on each quantized tensor."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx, nn

from qtoolkit.backends import Backend, Role
from qtoolkit.config import QConfigMapping, QuantSpec
from qtoolkit.graph.kinds import WEIGHTED_KINDS, kind_of, module_of, tensor_inputs
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.graph.swap import config_of
from qtoolkit.nn import QuantWeighted
from qtoolkit.quantizer import TensorQuantizer

HOLDER = "activation_quantizers"


@dataclass(frozen=True)
class Edge:
    """A tensor on its way into an op that wants it quantized.

    Attributes:
        anchor: The op that makes the tensor: the quantizer comes right after it.
        through: The transparent ops between it and the consumer.
        consumer: The op that wants it quantized.
        spec: How the consumer's config quantizes it.
    """

    anchor: fx.Node
    through: tuple[fx.Node, ...]
    consumer: fx.Node
    spec: QuantSpec


def role_of(node: fx.Node, backend: Backend) -> Role:
    """Return a node's role on a backend; what it does not name is "float"."""
    return backend.roles.get(kind_of(node), "float")


def is_quantizer(node: fx.Node) -> bool:
    """Return whether a node is an activation quantizer."""
    return node.op == "call_module" and str(node.target).startswith(HOLDER + ".")


def run(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> QuantizedGraphModule:
    """Insert a quantizer on every tensor that the backend wants quantized, one for all its consumers.

    The quantizer of node `relu` is the submodule `activation_quantizers.relu`. Where consumers ask for different specs, the
    one with most bits holds. Nothing is inserted where quantizers are already.
    """
    if any(is_quantizer(node) for node in gm.graph.nodes):
        return gm
    by_anchor: dict[fx.Node, list[Edge]] = defaultdict(list)
    for edge in wanted_edges(gm, backend, mapping):
        by_anchor[edge.anchor].append(edge)
    if by_anchor:
        gm.add_module(HOLDER, nn.Module())
    for anchor, edges in by_anchor.items():
        _insert(gm, anchor, edges)
    gm.graph.lint()
    gm.recompile()
    return gm


def wanted_edges(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None) -> list[Edge]:
    """Return every edge that the backend and the config quantize."""
    edges = []
    for node in gm.graph.nodes:
        if role_of(node, backend) not in ("compute", "merge"):
            continue
        qconfig = config_of(node, backend, mapping)
        if qconfig is None or qconfig.activation is None or _weight_is_float(node):
            continue
        free = free_branch(node, backend)
        for source in dict.fromkeys(tensor_inputs(node)):
            if source is not free:
                edges.append(_edge(source, node, backend, qconfig.activation))
    return edges


def free_branch(node: fx.Node, backend: Backend) -> fx.Node | None:
    """Return the input of a residual add that stays unquantized, so that the target fuses its convolution with the add."""
    if role_of(node, backend) != "merge" or backend.residual_add == "both":
        return None
    branches = [source for source in tensor_inputs(node) if _ends_in_weights(source)]
    if len(branches) < 2:
        return branches[0] if branches else None
    # Both branches end in a convolution: the longer one is the main branch, the other the shortcut.
    return max(branches, key=lambda source: (_length_from_fork(source, node), source is branches[0]))


def _edge(source: fx.Node, consumer: fx.Node, backend: Backend, spec: QuantSpec) -> Edge:
    through: list[fx.Node] = []
    while role_of(source, backend) == "transparent":
        through.append(source)
        source = tensor_inputs(source)[0]
    return Edge(source, tuple(through), consumer, spec)


def _insert(gm: QuantizedGraphModule, anchor: fx.Node, edges: list[Edge]) -> None:
    spec = max((edge.spec for edge in edges), key=lambda s: s.bits)
    target = f"{HOLDER}.{anchor.name}"
    quantizer = TensorQuantizer(spec, name=target)
    device = next((p.device for p in gm.parameters()), torch.device("cpu"))
    gm.add_submodule(target, quantizer.to(device))
    quantizer.train(gm.training)
    with gm.graph.inserting_after(anchor):
        node = gm.graph.call_module(target, (anchor,))
    on_the_way = {n for edge in edges for n in (*edge.through, edge.consumer)}
    for user in list(anchor.users):
        if user in on_the_way:
            user.replace_input_with(anchor, node)


def _weight_is_float(node: fx.Node) -> bool:
    # A layer whose weight stays float computes in float: quantizing its input would only cost accuracy.
    return kind_of(node) in WEIGHTED_KINDS and not (
        node.op == "call_module" and isinstance(module_of(node), QuantWeighted)
    )


def _ends_in_weights(node: fx.Node) -> bool:
    """Whether a tensor comes straight from a weighted layer (and its batch norm) and goes nowhere else."""
    if len(node.users) != 1:
        return False
    if kind_of(node) == "batch_norm":
        return _ends_in_weights(tensor_inputs(node)[0])
    return kind_of(node) in WEIGHTED_KINDS and not _weight_is_float(node)


def _length_from_fork(branch: fx.Node, merge: fx.Node) -> int:
    """Count the nodes on a branch that the merge's other branches do not share."""
    others: set[fx.Node] = set()
    for source in tensor_inputs(merge):
        if source is not branch:
            others |= _ancestors(source)
    return len(_ancestors(branch) - others)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += current.all_input_nodes
    return found
