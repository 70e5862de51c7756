"""The products of two activations in a graph, and fused attention; with the quantizers of their operands in training."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from qtoolkit.backends import Backend
from qtoolkit.graph.placement.sources import source_in_training
from qtoolkit.nn import fused_attention, product
from qtoolkit.nn.on_codes import TrainingArithmetic
from qtoolkit.nn.product import Product

# Ops of two batches of matrices, with the functions that compute them.
OPS: Mapping[Any, Callable[..., Tensor]] = {
    **{op: op for op in (torch.matmul, torch.bmm, operator.matmul, operator.imatmul)},
    "matmul": torch.matmul,
    "__matmul__": torch.matmul,
    "bmm": torch.bmm,
}
ATTENTION = F.scaled_dot_product_attention
# Its arguments that the op with codes does not take.
NO_OTHERS = {"attn_mask": None, "dropout_p": 0.0, "enable_gqa": False}


def is_product_call(node: fx.Node) -> bool:
    """Return whether a node calls a matrix product of two tensors or a plain attention of three, which may keep integers."""
    is_op = node.op in ("call_function", "call_method")
    if not is_op or not all(isinstance(operand, fx.Node) for operand in node.args):
        return False
    if node.target is ATTENTION:
        return len(node.args) == 3 and all(node.kwargs.get(name, none) == none for name, none in NO_OTHERS.items())
    return node.target in OPS and len(node.args) == 2 and not node.kwargs


def function_of(node: fx.Node, how: Product) -> Callable[..., Tensor]:
    """Return the function that computes such an op, from its operands as integers and the arguments of its node."""
    return fused_attention.attention_of(how) if node.target is ATTENTION else product.product_of(OPS[node.target], how)


def link_products(
    graph: fx.Graph, backend: Backend, arithmetic: TrainingArithmetic, products: Mapping[str, Product]
) -> None:
    """Tell each product, by the name of its node, how it computes in training, and the sources of its operands."""
    for node in graph.nodes:
        if node.name in products:
            operands = [operand for operand in node.args if isinstance(operand, fx.Node)]  # one may be there twice
            how = products[node.name]
            how.arithmetic, how.links = arithmetic, tuple(source_in_training(operand, backend) for operand in operands)


def sentence(node: fx.Node, how: Product) -> str:
    """Return how a product computes in training and which tensors it keeps for backward."""
    described = fused_attention.described if node.target is ATTENTION else product.described
    return described(how.sources, how.arithmetic)
