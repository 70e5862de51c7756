"""Units of ops that a target computes as one; in them, batch norms are taken over (training) or folded (eval)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.config import QConfigMapping
from qtoolkit.graph.kinds import WEIGHTED_KINDS, kind_of, module_of
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.graph.swap import config_of
from qtoolkit.nn import LinkedBatchNorm, QuantWeighted
from qtoolkit.nn.batch_norm import linked

WEIGHTED = frozenset(WEIGHTED_KINDS)
BATCH_NORM = frozenset({"batch_norm"})
ACTIVATION = frozenset({"relu"})

# Chains that are one unit, the longest first.
CHAINS = (
    (WEIGHTED, BATCH_NORM, ACTIVATION),
    (WEIGHTED, BATCH_NORM),
    (WEIGHTED, ACTIVATION),
    (BATCH_NORM, ACTIVATION),
)


@dataclass(frozen=True)
class Unit:
    """Ops that a target computes as one: each alone takes the output of the one before.

    Attributes:
        nodes: The ops in order.
    """

    nodes: tuple[fx.Node, ...]

    @property
    def head(self) -> fx.Node:
        """The first op, which takes the inputs."""
        return self.nodes[0]

    @property
    def batch_norm(self) -> fx.Node | None:
        """The batch norm behind the head, or None."""
        return next((n for n in self.nodes[1:] if kind_of(n) in BATCH_NORM), None)

    @property
    def activation(self) -> fx.Node | None:
        """The activation at the end, or None."""
        return self.nodes[-1] if kind_of(self.nodes[-1]) in ACTIVATION else None


def units_of(gm: fx.GraphModule) -> dict[fx.Node, Unit]:
    """Return the unit of each node that is in one. A chain whose middle has a second user is none."""
    units: dict[fx.Node, Unit] = {}
    for node in gm.graph.nodes:
        if node in units:
            continue
        for chain in CHAINS:
            nodes = _follow(node, chain)
            if nodes is not None:
                units.update(dict.fromkeys(nodes, Unit(nodes)))
                break
    return units


def _follow(node: fx.Node, chain: tuple[frozenset[str], ...]) -> tuple[fx.Node, ...] | None:
    if kind_of(node) not in chain[0]:
        return None
    nodes = [node]
    for kinds in chain[1:]:
        if len(nodes[-1].users) != 1:
            return None
        follower = next(iter(nodes[-1].users))
        if kind_of(follower) not in kinds or follower.all_input_nodes[:1] != nodes[-1:]:
            return None
        nodes.append(follower)
    return tuple(nodes)


def run(gm: QuantizedGraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> QuantizedGraphModule:
    """Let each QAT layer take over the batch norm that follows it, or fold that one where the model is in eval mode.

    Raises:
        ValueError: The backend's strategy for batch norms is not known, or does not fit one of them.
    """
    calls = calls_of(gm)
    for unit in dict.fromkeys(units_of(gm).values()):
        follower = unit.batch_norm
        if follower is None or reason_apart(unit.head, follower, calls, backend, mapping) is not None:
            continue
        if gm.training:
            _link(gm, unit.head, follower, backend.batch_norm)
        else:
            fold(gm, unit.head, follower)
    gm.recompile()
    return gm


def calls_of(gm: fx.GraphModule) -> Mapping[str, int]:
    """Return how often the graph calls each module."""
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_module")


def reason_apart(
    node: fx.Node,
    follower: fx.Node,
    calls: Mapping[str, int],
    backend: Backend,
    mapping: QConfigMapping | None = None,
) -> str | None:
    """Return why a layer does not take over the batch norm behind it, or None where it does."""
    layer = module_of(node) if node.op == "call_module" else None
    if not isinstance(layer, QuantWeighted):
        return "its layer is not quantized"
    if follower.op != "call_module":
        return "it is called as a function; make it a torch.nn module"
    bn = module_of(follower)
    if calls[str(node.target)] > 1 or calls[str(follower.target)] > 1:
        return "it or its layer is called more than once"
    if bn.running_mean is None or bn.running_var is None:
        return "it has no running statistics: track_running_stats=False"
    if int(bn.running_mean.numel()) != layer.channels():  # type: ignore[operator]  # a Tensor
        return f"it has {bn.running_mean.numel()} channels and its layer {layer.channels()}"  # type: ignore[operator]
    return "the qconfig_mapping says so" if config_of(follower, backend, mapping) is None else None


def linked_pairs(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Return each QAT layer with the batch norm that it has taken over."""
    pairs = []
    for node in gm.graph.nodes:
        layer = module_of(node) if node.op == "call_module" else None
        if isinstance(layer, QuantWeighted) and layer.batch_norm is not None:
            pairs.append((node, next(iter(node.users))))
    return pairs


def _link(gm: QuantizedGraphModule, node: fx.Node, follower: fx.Node, strategy: str) -> None:
    layer, bn = module_of(node), module_of(follower)
    if isinstance(layer, QuantWeighted) and not isinstance(bn, LinkedBatchNorm):
        new = linked(bn, strategy, str(follower.target))
        gm.set_submodule(str(follower.target), new)
        layer.link_batch_norm(new)


def fold(gm: QuantizedGraphModule, node: fx.Node, follower: fx.Node) -> None:
    """Fold a batch norm into the layer before it, and take it out of the graph."""
    layer = module_of(node)
    if not isinstance(layer, QuantWeighted):
        raise TypeError(f"{node.name!r} is no QAT layer, so {follower.name!r} cannot be folded into it.")
    layer.fold_batch_norm(module_of(follower))
    follower.replace_all_uses_with(node)
    gm.graph.erase_node(follower)
    gm.delete_submodule(str(follower.target))
