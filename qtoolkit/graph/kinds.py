"""What kind of op a node is: modules, functions, operators and methods in one table, so that passes never special-case."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.nn import QAT_MODULES, QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm

MODULE_KINDS: Mapping[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.MaxPool2d: "max_pool",
    nn.AvgPool2d: "avg_pool",
    nn.AdaptiveAvgPool2d: "avg_pool",
    nn.Flatten: "flatten",
    nn.Identity: "identity",
    nn.Dropout: "identity",
    nn.Dropout2d: "identity",
    **{float_type: qat.KIND for float_type, qat in QAT_MODULES.items()},
}

FUNCTION_KINDS: Mapping[Callable[..., Any], str] = {
    F.conv2d: "conv",
    F.conv_transpose2d: "conv_transpose",
    F.linear: "linear",
    F.conv1d: "conv",
    F.conv3d: "conv",
    F.conv_transpose1d: "conv_transpose",
    F.conv_transpose3d: "conv_transpose",
    F.embedding: "embedding",
    F.batch_norm: "batch_norm",
    F.relu: "relu",
    torch.relu: "relu",
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    F.max_pool2d: "max_pool",
    torch.max_pool2d: "max_pool",
    F.avg_pool2d: "avg_pool",
    F.adaptive_avg_pool2d: "avg_pool",
    torch.mean: "avg_pool",
    torch.flatten: "flatten",
    F.dropout: "identity",
    operator.getitem: "slice",
    F.pad: "zero_pad",
}

METHOD_KINDS: Mapping[str, str] = {
    "relu": "relu",
    "relu_": "relu",
    "add": "add",
    "add_": "add",
    "mean": "avg_pool",
    "flatten": "flatten",
    "contiguous": "identity",
}

# The layers that have weights; the others have inputs alone.
WEIGHTED_KINDS = ("conv", "conv_transpose", "linear")

OTHER = "other"


def kind_of(node: fx.Node) -> str:
    """Return the kind of a node: a name from the tables, "other", or the node's own op for inputs, outputs, constants."""
    if node.op == "call_module":
        module = module_of(node)
        kind = module.KIND if isinstance(module, QuantModule) else MODULE_KINDS.get(type(module), OTHER)
        kind = "batch_norm" if kind == OTHER and is_batch_norm(module) else kind
    elif node.op == "call_function":
        kind = FUNCTION_KINDS.get(node.target, OTHER)  # type: ignore[arg-type]
    elif node.op == "call_method":
        kind = METHOD_KINDS.get(str(node.target), OTHER)
    else:
        return node.op
    return kind if _CONDITIONS.get(kind, _always)(node) else OTHER


def object_type_of(node: fx.Node) -> Any:
    """Return what QConfigMapping.set_object_type names for a node: its (float) module type, or its function."""
    if node.op == "call_module":
        module = module_of(node)
        return module.FLOAT if isinstance(module, QuantModule) else type(module)
    return node.target


def module_of(node: fx.Node) -> nn.Module:
    """Return the module that a call_module node calls."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, str):
        raise TypeError(f"node {node.name!r} calls no module of a GraphModule.")
    return owner.get_submodule(node.target)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that feed an op's data inputs: the first one, and for an add both."""
    values = [*node.args, *node.kwargs.values()]
    nodes = [v for v in values if isinstance(v, fx.Node)]
    return nodes[: _DATA_INPUTS.get(kind_of(node), 1)]


# Kinds with more data inputs than one, or with none (an embedding takes indices).
_DATA_INPUTS: Mapping[str, int] = {"add": 2, "attention": 3, "embedding": 0}


def _always(node: fx.Node) -> bool:
    return True


def _adds_two_tensors(node: fx.Node) -> bool:
    operands = [*node.args, *(v for k, v in node.kwargs.items() if k in ("input", "other"))]
    two_tensors = len(operands) == 2 and all(isinstance(v, fx.Node) for v in operands)
    return two_tensors and bool(node.kwargs.get("alpha", 1) == 1)


def _pads_with_zero(node: fx.Node) -> bool:
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return bool(mode == "constant" and value in (None, 0))


def _slices_a_tensor(node: fx.Node) -> bool:
    index = node.args[1]
    return isinstance(index, tuple) and all(isinstance(i, slice) or i is Ellipsis for i in index)


def _averages_space(node: fx.Node) -> bool:
    if node.op == "call_module" or node.target not in (torch.mean, "mean"):
        return True
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(dims, list | tuple) and sorted(dims) in ([2, 3], [-2, -1])


_CONDITIONS: Mapping[str, Callable[[fx.Node], bool]] = {
    "add": _adds_two_tensors,
    "zero_pad": _pads_with_zero,
    "slice": _slices_a_tensor,
    "avg_pool": _averages_space,
}
