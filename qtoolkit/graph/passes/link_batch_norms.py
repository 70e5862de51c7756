"""Find layers with a batch norm after them. In training mode the layer takes it over; in eval mode it is folded at once."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator

from torch import fx, nn

from qtoolkit.errors import some
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls
from qtoolkit.graph.nodes import kind_of, readers_of
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import LinkedBatchNorm, QuantWeighted
from qtoolkit.nn.batch_norm import linked
from qtoolkit.op_kinds.facts import replace_node
from qtoolkit.op_kinds.rules import called_module, module_of


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Let each QAT layer take over the batch norm after it, or fold it into the layer where the model is in eval mode.

    Raises ValueError: the backend's strategy for batch norms is not known, or does not fit one of them; or a hook takes the
    values between a layer and its batch norm.
    """
    calls = ModuleCalls(gm.graph)
    for node, follower in list(batch_norms(gm)):
        if why_not_linked(node, follower, calls, rules) is not None:
            continue
        _check_hooks(node, follower)
        if gm.training:
            layer, bn = module_of(node), module_of(follower)
            if isinstance(layer, QuantWeighted) and not isinstance(bn, LinkedBatchNorm):
                new = linked(bn, rules.backend.batch_norm, str(follower.target))
                gm.set_submodule(str(follower.target), new)
                layer.link_batch_norm(new)
        else:
            fold(gm, node, follower).reset_weight_range()
    _warn_of_sizes(gm)
    gm.recompile()
    return gm


def batch_norms(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Return each layer, or function, with the batch norm that takes its output."""
    for follower in gm.graph.nodes:
        if kind_of(follower).normalizes_batches and kind_of(follower.all_input_nodes[0]).layer:
            yield follower.all_input_nodes[0], follower


def why_not_linked(node: fx.Node, follower: fx.Node, calls: ModuleCalls, rules: LayerRules) -> str | None:
    """Return why a layer does not take over the batch norm after it, or None where it does."""
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
    if not (calls.is_only_one(node) and calls.is_only_one(follower)):
        return "it or its layer is called more than once"
    if layer.input_quantizer is not None:
        return "its layer is also called inside a leaf module"
    if bn.running_mean is None or bn.running_var is None:
        return "it has no running statistics: track_running_stats=False"
    if int(bn.running_mean.numel()) != layer.channels():  # type: ignore[operator]  # a Tensor
        return f"it has {bn.running_mean.numel()} channels and its layer {layer.channels()}"  # type: ignore[operator]
    return "the qconfig_mapping leaves it in float" if rule_of_node(follower, rules).qconfig is None else None


def _warn_of_sizes(gm: fx.GraphModule) -> None:
    """Warn of layers whose quantizer gives their weights another size, which no normalization behind them takes out."""
    names = dict[str, str]()
    for node in gm.graph.nodes:
        layer = called_module(node)
        reason = layer.why_batch_norm_stays() if isinstance(layer, QuantWeighted) else None
        if reason is not None and not _is_normalized(node):
            names[str(node.target)] = reason
    if names:
        warnings.warn(
            f"prepare: no normalization takes the outputs of {some([repr(name) for name in names])}, but "
            f"{' and '.join(dict.fromkeys(names.values()))}: the outputs change with them, before and in training. Put a batch "
            f"norm behind these layers, or give them quantizer='lsq' in the QConfigMapping.",
            stacklevel=5,  # the caller of prepare
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


def fold(gm: QuantizedGraphModule, node: fx.Node, follower: fx.Node) -> QuantWeighted:
    """Fold a batch norm into the layer before it, and remove it from the graph. Return the layer; its ranges stay."""
    layer = module_of(node)
    if not isinstance(layer, QuantWeighted):
        raise TypeError(
            f"{node.name!r} is not a QAT layer, so the batch norm {follower.name!r} cannot be folded into it."
        )
    bn, name = module_of(follower), str(follower.target)
    layer.fold_batch_norm(bn)
    replace_node(follower, node)
    if bn._modules:  # an activation inside the batch norm stays
        gm.set_submodule(name, nn.Sequential(OrderedDict(bn.named_children())).train(bn.training))
    elif isinstance(gm.get_submodule(name.rpartition(".")[0]), nn.Sequential | nn.ModuleList):
        gm.set_submodule(name, nn.Identity())  # the modules behind it keep their places
    else:
        gm.delete_submodule(name)
    return layer
