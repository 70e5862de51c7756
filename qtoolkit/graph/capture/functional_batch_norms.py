"""Batch norms whose subclass calls the function: make them modules, so that the layer before them can take them over.

timm's BatchNormAct2d, for one, calls torch.nn.functional.batch_norm with its own parameters, and then its activation.
"""

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.graph.capture.mode import is_mode
from qtoolkit.graph.capture.subclasses import replace_module
from qtoolkit.nn.batch_norm import BATCH_NORMS
from qtoolkit.nn.module import shallow_copy_as
from qtoolkit.op_kinds.rules import argument

TENSORS = ("running_mean", "running_var", "weight", "bias")


def run(model: nn.Module, graph: fx.Graph) -> None:
    """Replace F.batch_norm by a call of the module that owns all its arguments, which becomes torch's own type.

    What such a module holds besides, an activation say, stays in it, by its name.

    Args:
        model: The model that was traced, which is changed.
        graph: Its graph.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            owner = _owner(model, node)
            if owner is not None:
                _call_module(model, node, owner)


def _owner(model: nn.Module, node: fx.Node) -> str | None:
    """Return the name of the module that a batch norm's arguments are of, all of them; None where there is none."""
    mean = argument(node, 1, "running_mean")
    name = str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else ""
    module = model.get_submodule(name)
    if not name or _torch_type(module) is None:
        return None
    tensors = {of: argument(node, i + 1, of) for i, of in enumerate(TENSORS)}
    own: Any = module.momentum, module.eps
    numbers = argument(node, 6, "momentum", 0.1), argument(node, 7, "eps", 1e-5)
    if numbers != own or any(_value(model, t) is not getattr(module, of) for of, t in tensors.items()):
        return None
    return name if _follows_mode(argument(node, 5, "training", False), module, name) else None


def _torch_type(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in type(module).__mro__ if base in BATCH_NORMS), None)


def _value(model: nn.Module, operand: Any) -> Any:
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return operand
    owner, _, name = str(operand.target).rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _follows_mode(training: Any, module: nn.Module, name: str) -> bool:
    if isinstance(training, fx.Node):
        return is_mode(training) and str(training.target).rpartition(".")[0] == name
    return bool(training) == module.training


def _call_module(model: nn.Module, node: fx.Node, name: str) -> None:
    module, source = model.get_submodule(name), node.all_input_nodes[0]
    torch_type = _torch_type(module)
    if torch_type is None:
        raise TypeError(f"{name!r} is no batch norm.")
    plain, graph = shallow_copy_as(torch_type, module), node.graph
    replace_module(model, module, plain)
    with graph.inserting_before(node):
        new = graph.call_module(name, (source,))
    node.replace_all_uses_with(new)
    tensors = node.all_input_nodes[1:]
    graph.erase_node(node)
    for unused in (tensor for tensor in tensors if not tensor.users):
        graph.erase_node(unused)
    _forget_dimension_checks(source)
    _forget_counting(graph, name)


def _forget_dimension_checks(source: fx.Node) -> None:
    """Erase assertions on the input's number of dimensions, which torch's own batch norms check."""
    for dims in [user for user in source.users if _reads_dimensions(user)]:
        conditions = list(dims.users)
        checks = [check for condition in conditions for check in condition.users]
        if all(check.target is torch._assert for check in checks):
            for unused in (*checks, *conditions, dims):
                source.graph.erase_node(unused)


def _reads_dimensions(node: fx.Node) -> bool:
    return (node.target is getattr and node.args[1:] == ("ndim",)) or (node.op, node.target) == ("call_method", "dim")


def _forget_counting(graph: fx.Graph, name: str) -> None:
    """Erase what counts the batches, which torch's own batch norms do."""
    for counter in graph.find_nodes(op="get_attr", target=f"{name}.num_batches_tracked"):
        if all(user.target == "add_" and not user.users for user in counter.users):
            for user in list(counter.users):
                graph.erase_node(user)
            graph.erase_node(counter)
