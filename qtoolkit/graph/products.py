"""The products of two activations in a graph, and the quantizers of their operands in training."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from qtoolkit.backends import Backend
from qtoolkit.graph.placement.traversal import quantizer_behind
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.nn.product import Product, described
from qtoolkit.op_kinds.nodes import is_weight_quantizer, module_of
from qtoolkit.quantizers.quantizer import Quantizer

# Ops of two batches of matrices, with the functions that compute them.
OPS: Mapping[Any, Callable[..., Tensor]] = {
    **{op: op for op in (torch.matmul, torch.bmm, operator.matmul, operator.imatmul)},
    "matmul": torch.matmul,
    "__matmul__": torch.matmul,
    "bmm": torch.bmm,
}

Sources = tuple[Quantizer | None, ...]


def is_product_call(node: fx.Node) -> bool:
    """Return whether a node calls a matrix product with two tensors, and nothing else."""
    if node.op not in ("call_function", "call_method") or node.target not in OPS or node.kwargs:
        return False
    return len(node.args) == 2 and all(isinstance(operand, fx.Node) for operand in node.args)


def link_products(
    graph: fx.Graph, backend: Backend, arithmetic: TrainingArithmetic, products: Mapping[str, Product]
) -> None:
    """Tell each product, by the name of its node, how it computes in training, and the quantizers of its operands."""
    for node in graph.nodes:
        if node.name in products:
            how = products[node.name]
            how.arithmetic, how.sources = arithmetic, _sources_of(node, backend)


def sentence(node: fx.Node, backend: Backend, arithmetic: TrainingArithmetic) -> str:
    """Return how a product computes in training and what it keeps for backward."""
    return described(_sources_of(node, backend), arithmetic)


def _sources_of(node: fx.Node, backend: Backend) -> Sources:
    behind = [
        quantizer_behind(operand, backend, in_training=True) for operand in node.args if isinstance(operand, fx.Node)
    ]
    return tuple(_quantizer_of(quantizer) for quantizer in behind)


def _quantizer_of(node: fx.Node | None) -> Quantizer | None:
    module = None if node is None or is_weight_quantizer(node) else module_of(node)
    return module if isinstance(module, Quantizer) else None
