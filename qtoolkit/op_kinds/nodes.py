"""What kind of op a node is, by one table of modules, functions, operators and methods, so that passes never special-case."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.nn import LinkedBatchNorm, QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.recorded import is_mode
from qtoolkit.op_kinds.rules import OTHER, gives_tuple, is_number
from qtoolkit.op_kinds.table import (
    FOREIGN,
    KINDS,
    ROW_OF_FUNCTION,
    ROW_OF_KIND,
    ROW_OF_METHOD,
    ROW_OF_MODULE,
    WEIGHTED,
    Row,
)

# The layers that have weights; the others have inputs alone.
WEIGHTED_KINDS = ("conv", "conv_transpose", "linear")
# Ops that multiply by what can be a weight, when they are called as functions.
MULTIPLYING_KINDS = (*WEIGHTED_KINDS, "matmul")
# The kinds of all ops that return one tensor; of ops that can return several, `gives_tuple` tells.
GIVE_ONE_TENSOR = {kind for kind in KINDS if kind not in ("attention", "recurrent", "split")}

__all__ = [
    "KINDS",
    "MULTIPLYING_KINDS",
    "OTHER",
    "WEIGHTED_KINDS",
    "kind_of",
    "kind_of_module",
    "module_of",
    "object_type_of",
    "parameters_in",
    "tensor_inputs",
]


def kind_of(node: fx.Node) -> str:
    """Return the kind of a node: one of the table's, "other", or the node's own op for inputs, outputs, constants."""
    if node.op not in ("call_module", "call_function", "call_method"):
        return node.op
    row = row_of(node)
    if row is None or is_number(node):
        return OTHER
    kind = row.kind if row.refine is None else row.refine(node)
    return "slice" if kind == OTHER and _picks_one(node) else kind


def _picks_one(node: fx.Node) -> bool:
    """Return whether a node takes x[0] of what is known to be one tensor, and no tuple."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and not gives_tuple(source) and kind_of(source) in GIVE_ONE_TENSOR


def row_of(node: fx.Node) -> Row | None:
    """Return the table's row of a node, or None."""
    if node.op == "call_module":
        return _row_of_module(module_of(node))
    if node.op == "call_method":
        return ROW_OF_METHOD.get(str(node.target))
    if not callable(node.target):
        return None
    name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
    return ROW_OF_FUNCTION.get(node.target) or FOREIGN.get(name)


def kind_of_module(module: nn.Module) -> str:
    """Return the kind of a module that no graph calls."""
    row = _row_of_module(module)
    return OTHER if row is None else row.kind


def _row_of_module(module: nn.Module) -> Row | None:
    # By exact type: a subclass of a float layer may compute anything. A QAT module says itself what it is.
    if isinstance(module, QuantModule):
        return ROW_OF_KIND.get(module.KIND)
    if is_batch_norm(module):
        return ROW_OF_KIND["batch_norm"]
    return ROW_OF_MODULE.get(type(module)) or FOREIGN.get((type(module).__module__, type(module).__name__))


def float_type(module: nn.Module) -> type[nn.Module]:
    """Return the type of a module, or the float type of a QAT module."""
    if isinstance(module, LinkedBatchNorm):
        return module.float_type
    return module.FLOAT if isinstance(module, QuantModule) else type(module)


def object_type_of(node: fx.Node) -> Any:
    """Return what QConfigMapping.set_object_type names for a node: its (float) module type, function or tensor method."""
    if node.op == "call_module":
        return float_type(module_of(node))
    return getattr(torch.Tensor, str(node.target), node.target) if node.op == "call_method" else node.target


def module_of(node: fx.Node) -> nn.Module:
    """Return the module that a call_module node calls."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, str):
        raise TypeError(f"node {node.name!r} calls no module of a GraphModule.")
    return owner.get_submodule(node.target)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that feed an op's data inputs, weights of functions among them, each once, in order; no numbers.

    Of an op that the table does not know, all its inputs.
    """
    row = row_of(node)
    sources = node.all_input_nodes if row is None or is_number(node) else dict.fromkeys(_nodes_in(_data(node, row)))
    return [source for source in sources if not (is_mode(source) or is_number(source))]


def parameters_in(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are parameters or buffers, or computed from nothing else."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        computed = node.op in ("call_function", "call_method") and node.all_input_nodes
        if node.op == "get_attr" or (computed and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _data(node: fx.Node, row: Row) -> Iterable[Any]:
    # A module owns its weight: a further argument, such as output_size, is no data.
    operands = row.operands[:1] if node.op == "call_module" and row.operands == WEIGHTED else row.operands
    for position, names in enumerate(operands):
        keywords = [node.kwargs[name] for name in names if name in node.kwargs]
        if names and len(node.args) > position:
            yield node.args[position]
        yield from keywords
    if row.rest:
        yield from node.args[len(row.operands) :]


def _nodes_in(values: Iterable[Any]) -> Iterable[fx.Node]:
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, list | tuple):
            yield from _nodes_in(value)
