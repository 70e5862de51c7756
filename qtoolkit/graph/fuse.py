"""Find weighted layers followed by a batch norm. Training: link the two. Eval: fold the batch norm into the weight."""

from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from qtoolkit.graph.kinds import WEIGHTED_KINDS, kind_of, module_of
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.nn import QuantWeighted


def batch_norm_after(node: fx.Node) -> fx.Node | None:
    """Return the batch norm that alone takes a weighted layer's output, where the two can become one layer."""
    if kind_of(node) not in WEIGHTED_KINDS or node.op != "call_module" or len(node.users) != 1:
        return None
    follower = next(iter(node.users))
    if kind_of(follower) != "batch_norm" or follower.op != "call_module" or follower.args[:1] != (node,):
        return None
    bn = module_of(follower)
    foldable = isinstance(bn, _BatchNorm) and bn.running_mean is not None
    return follower if foldable and _called_once(node) and _called_once(follower) else None


def linked_pairs(gm: QuantizedGraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Return each QAT layer with the batch norm that can become part of it."""
    pairs = [(node, batch_norm_after(node)) for node in gm.graph.nodes]
    return [(n, follower) for n, follower in pairs if follower is not None and isinstance(module_of(n), QuantWeighted)]


def run(gm: QuantizedGraphModule) -> QuantizedGraphModule:
    """Link each QAT layer to the batch norm that follows it, or fold that one where the model is in eval mode."""
    for node, follower in linked_pairs(gm):
        if gm.training:
            module_of(node).link_batch_norm(module_of(follower))  # type: ignore[operator]  # linked_pairs has checked
        else:
            fold(gm, node, follower)
    gm.recompile()
    return gm


def fold(gm: QuantizedGraphModule, node: fx.Node, follower: fx.Node) -> None:
    """Fold a batch norm into the layer before it, and take it out of the graph."""
    layer, bn = module_of(node), module_of(follower)
    if not isinstance(layer, QuantWeighted) or not isinstance(bn, _BatchNorm):
        raise TypeError(f"{node.name!r} and {follower.name!r} are no QAT layer with its batch norm.")
    layer.fold_batch_norm(bn)
    follower.replace_all_uses_with(node)
    gm.graph.erase_node(follower)
    gm.delete_submodule(str(follower.target))


def _called_once(node: fx.Node) -> bool:
    calls: int = sum(n.op == "call_module" and n.target == node.target for n in node.graph.nodes)
    return calls == 1
