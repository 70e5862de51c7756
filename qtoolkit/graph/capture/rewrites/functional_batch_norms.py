"""Batch norms of a subclass that calls F.batch_norm: they become modules, so that the layer before them can fuse with them.

For example, timm's BatchNormAct2d calls torch.nn.functional.batch_norm with its own parameters, and then its activation.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.graph.capture.rewrites.both_modes import Traced
from qtoolkit.graph.capture.rewrites.functional_layers import call_layer
from qtoolkit.nn.batch_norm import BATCH_NORMS
from qtoolkit.nn.module import shallow_copy_as
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.recorded import check_size
from qtoolkit.op_kinds.rules import argument
from qtoolkit.shared_modules import replace_everywhere

TENSORS = ("running_mean", "running_var", "weight", "bias")


def run(traced: Traced) -> list[str]:
    """Replace calls of F.batch_norm in a graph by calls of the module that owns all their arguments.

    Returns the names of these modules, whose types `use_torch_types` must replace.
    """
    names = []
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and node.target in (F.batch_norm, torch.batch_norm):
            owner = _owner(traced.model, node, traced.modes)
            if owner is not None:
                source, call = node.all_input_nodes[0], facts_of(node).call
                call_layer(node, owner, source)
                _erase_dimension_checks(source, call)
                _erase_batch_counter(source.graph, owner)
                names.append(owner)
    return names


def use_torch_types(traced: Traced, names: Iterable[str]) -> None:
    """Replace batch norms by torch's type. They keep their submodules, such as an activation, under their names."""
    for name in names:
        module = traced.model.get_submodule(name)
        torch_type = _torch_type(module)
        if torch_type is None:
            raise TypeError(f"{name!r} is not a batch norm.")
        replace_everywhere(traced.model, module, shallow_copy_as(torch_type, module))


def _owner(model: nn.Module, node: fx.Node, modes: Mapping[nn.Module, fx.Node]) -> str | None:
    """Return the name of the module that owns all arguments of a batch norm, or None."""
    mean = argument(node, 1, "running_mean")
    name = str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else ""
    module = model.get_submodule(name)
    if not name or _torch_type(module) is None:
        return None
    tensors = {of: argument(node, i + 1, of) for i, of in enumerate(TENSORS)}
    training = argument(node, 5, "training", False)
    # in eval mode, in which torch's batch norms pass 0, momentum has no effect
    same_momentum = training is False or argument(node, 6, "momentum", 0.1) == module.momentum
    if not same_momentum or argument(node, 7, "eps", 1e-5) != module.eps:
        return None
    if any(_value(model, t) is not getattr(module, of) for of, t in tensors.items()):
        return None
    follows_mode = modes.get(module) is training if isinstance(training, fx.Node) else bool(training) == module.training
    return name if follows_mode else None


def _torch_type(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in type(module).__mro__ if base in BATCH_NORMS), None)


def _value(model: nn.Module, operand: object) -> object:
    if isinstance(operand, fx.Node) and operand.op == "get_attr":
        return attrgetter(str(operand.target))(model)
    return operand


def _erase_dimension_checks(source: fx.Node, call: int | None) -> None:
    """Erase assertions on the number of dimensions of the input: torch's batch norms check it themselves.

    `call` is the call of the batch norm, whose forward tests it in Python; tests around it stay.
    """
    for dims in [user for user in source.users if _reads_dimensions(user)]:
        conditions = list(dims.users)
        checks = [check for condition in conditions for check in condition.users]
        is_own = facts_of(dims).call == call
        if all(check.target is torch._assert or (is_own and check.target is check_size) for check in checks):
            for unused in (*checks, *conditions, dims):
                source.graph.erase_node(unused)


def _reads_dimensions(node: fx.Node) -> bool:
    return (node.target is getattr and node.args[1:] == ("ndim",)) or (node.op, node.target) == ("call_method", "dim")


def _erase_batch_counter(graph: fx.Graph, name: str) -> None:
    """Erase the nodes that count batches: torch's batch norms count them themselves."""
    for counter in graph.find_nodes(op="get_attr", target=f"{name}.num_batches_tracked"):
        if all(user.target == "add_" and not user.users for user in counter.users):
            for user in list(counter.users):
                graph.erase_node(user)
            graph.erase_node(counter)
