"""Find layers with a batch norm after them. In training mode the layer takes it over; in eval mode it is folded at once."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from torch import fx, nn

from qtoolkit.errors import some, warn
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls, why_read
from qtoolkit.graph.nodes import kind_of, readers_of
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import LinkedBatchNorm, QuantWeighted
from qtoolkit.nn.batch_norm import linked
from qtoolkit.op_kinds.facts import facts_of, replace_node
from qtoolkit.op_kinds.rules import called_module, module_of

NO_LAYER = "no layer right before it"
Pair = tuple[fx.Node, fx.Node]
"""The call of a layer, and the call of the batch norm that takes its output."""


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Let each QAT layer take over the batch norm after it, or fold it into the layer where the model is in eval mode.

    Raises ValueError: the backend's strategy for batch norms is not known, or does not fit one of them; or a hook takes the
    values between a layer and its batch norm.
    """
    links = Links(gm.graph, rules)
    found = [(node, follower) for node, follower in batch_norms(gm) if links.why_not(follower) is None]
    for pair in found:
        _check_hooks(*pair)
    if gm.training:
        _link(gm, found, rules.backend.batch_norm)
    else:
        for layer in fold(gm, found):
            layer.reset_weight_range()
    _warn_of_sizes(gm)
    gm.recompile()
    return gm


def _link(gm: QuantizedGraphModule, pairs: Iterable[Pair], strategy: str) -> None:
    """Let layers take over the batch norms after them: one of several calls is linked once."""
    for node, follower in pairs:
        layer, bn, name = module_of(node), module_of(follower), str(follower.target)
        if not isinstance(bn, LinkedBatchNorm):
            bn = linked(bn, strategy, name)
            gm.set_submodule(name, bn)
        if isinstance(layer, QuantWeighted) and layer.batch_norm is not bn:
            layer.link_batch_norm(bn)


def batch_norms(gm: fx.GraphModule) -> Iterator[Pair]:
    """Return each layer, or function, with the batch norm that takes its output."""
    for follower in gm.graph.nodes:
        if kind_of(follower).normalizes_batches and kind_of(follower.all_input_nodes[0]).layer:
            yield follower.all_input_nodes[0], follower


class Links:
    """Which layers take over the batch norms after them, and why others do not.

    Both may be called any number of times, and a batch norm after several layers: each time one right after the other.
    """

    def __init__(self, graph: fx.Graph, rules: LayerRules) -> None:
        self.calls, self.rules = ModuleCalls(graph), rules
        self._apart: dict[fx.Node, str | None] = {}  # by the call of a batch norm
        self._together: dict[nn.Module, str | None] = {}  # by the batch norm

    def why_not(self, follower: fx.Node) -> str | None:
        """Return why a layer does not take over the batch norm that this node calls, or None where it does."""
        reason = self._why_apart(follower)
        if reason is not None:
            return reason
        bn = module_of(follower)
        if bn not in self._together:
            self._together[bn] = self._why_not_all(self.calls.of(bn))
        return self._together[bn]

    def _why_not_all(self, followers: Sequence[fx.Node]) -> str | None:
        for each in followers:
            if self._why_apart(each) is not None:
                return f"it is called more than once, and at {each.name!r} not folded"
        followed = {each.all_input_nodes[0] for each in followers}
        layers = {module_of(node) for node in followed}
        if not all(followed.issuperset(self.calls.of(layer)) for layer in layers):
            return "its layer is called more than once, and not each time right before it"
        return None

    def _why_apart(self, follower: fx.Node) -> str | None:
        if follower not in self._apart:
            self._apart[follower] = _why_apart(follower.all_input_nodes[0], follower, self.rules)
        return self._apart[follower]


def _why_apart(node: fx.Node, follower: fx.Node, rules: LayerRules) -> str | None:
    """Return why a layer does not take over the batch norm after it in one of their calls, or None where it does."""
    if not kind_of(node).layer:
        return NO_LAYER
    if len(readers_of(node)) > 1:
        return "its layer's output has a second user"
    layer = called_module(node)
    if node.op != "call_module":
        return (
            f"{node.name!r} is a function whose weight no torch.nn layer holds for it alone; make it a torch.nn module"
        )
    if not isinstance(layer, QuantWeighted):
        return "its layer is not quantized"
    if follower.op != "call_module":
        return "it is called as a function; make it a torch.nn module"
    unfit = layer.why_batch_norm_stays()
    if unfit is not None:
        return unfit
    bn = module_of(follower)
    if layer.input_quantizer is not None:
        return "its layer is also called inside a leaf module"
    if bn.running_mean is None or bn.running_var is None:
        return "it has no running statistics: track_running_stats=False"
    if int(bn.running_mean.numel()) != layer.channels():  # type: ignore[operator]  # a Tensor
        return f"it has {bn.running_mean.numel()} channels and its layer {layer.channels()}"  # type: ignore[operator]
    dims = facts_of(follower).input_dims
    if dims not in (None, layer.weight.dim()):  # of an image without a batch, and of a linear layer's rows in a batch
        return f"it normalizes dimension 1 of its input of {dims} dimensions, which is not its layer's output channels"
    if rule_of_node(follower, rules).qconfig is None:
        return "the qconfig_mapping leaves it in float"
    return why_read(node.graph, layer, bn)


def _warn_of_sizes(gm: fx.GraphModule) -> None:
    """Warn of layers whose quantizer gives their weights another size, which no normalization after them takes out."""
    names = dict[str, str]()
    for node in gm.graph.nodes:
        layer = called_module(node)
        reason = layer.why_batch_norm_stays() if isinstance(layer, QuantWeighted) else None
        if reason is not None and not _is_normalized(node):
            names[str(node.target)] = reason
    if names:
        warn(
            f"prepare: no normalization takes the outputs of {some([repr(name) for name in names])}, and "
            f"{' and '.join(dict.fromkeys(names.values()))}: these outputs change, before and in training. Put a batch "
            f"norm after these layers, or give them quantizer='lsq' in the QConfigMapping.",
        )


def _is_normalized(node: fx.Node) -> bool:
    """Return whether an op that takes the output normalizes it, perhaps after a ReLU."""
    kinds = {user: kind_of(user) for user in node.users}
    return any(kind.normalizes or (kind.homogeneous and _is_normalized(user)) for user, kind in kinds.items())


def _check_hooks(node: fx.Node, follower: fx.Node) -> None:
    layer, bn = module_of(node), module_of(follower)
    if layer._forward_hooks or bn._forward_hooks or bn._forward_pre_hooks:
        hooked = node if layer._forward_hooks else follower
        raise ValueError(
            f"prepare: {str(hooked.target)!r} has forward hooks, which would get other values or be lost where the batch norm "
            f"{str(follower.target)!r} is folded into the layer {str(node.target)!r}; remove them first."
        )


def fold(gm: QuantizedGraphModule, pairs: Sequence[Pair]) -> list[QuantWeighted]:
    """Fold batch norms into the layers before them, and remove them from the graph. Return the layers; their ranges stay.

    `pairs` has all calls of a layer and of a batch norm.
    """
    layers = {layer: module_of(bn) for node, bn in pairs if isinstance(layer := module_of(node), QuantWeighted)}
    removed = {module_of(follower): str(follower.target) for _, follower in pairs}
    for layer, bn in layers.items():
        layer.fold_batch_norm(bn)
    for node, follower in pairs:
        replace_node(follower, node)
    for bn, name in removed.items():
        remove(gm, name, bn)
    return list(layers)


def remove(gm: QuantizedGraphModule, name: str, bn: nn.Module) -> None:
    """Remove a folded batch norm from the model."""
    if bn._modules:  # an activation inside the batch norm stays
        gm.set_submodule(name, nn.Sequential(OrderedDict(bn.named_children())).train(bn.training))
    elif isinstance(gm.get_submodule(name.rpartition(".")[0]), nn.Sequential | nn.ModuleList):
        gm.set_submodule(name, nn.Identity())  # the modules after it keep their places
    else:
        gm.delete_submodule(name)
