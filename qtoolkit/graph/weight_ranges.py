"""The ranges of weights that functions take, as F.conv2d(x, weight) does: those of quantizers that a pass inserted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from torch import Tensor, fx

from qtoolkit.graph.nodes import is_weight_quantizer
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.quantizers.weights import is_stale


def refresh(
    gm: fx.GraphModule, changed: bool, values_of: Callable[[Sequence[fx.Node]], Mapping[fx.Node, Tensor]]
) -> None:
    """Set each range that follows a weight to that of the weight, if it may have changed since it was taken.

    `changed` is whether a weight is known to have; `values_of` computes nodes that depend on parameters alone.
    """
    stale = [(quantizer, weight) for quantizer, weight in _weights(gm) if is_stale(quantizer, changed)]
    values = values_of([weight for _, weight in stale])
    for quantizer, weight in stale:
        quantizer.follow(values[weight])


def refresh_rates(gm: fx.GraphModule, values_of: Callable[[Sequence[fx.Node]], Mapping[fx.Node, Tensor]]) -> None:
    """Set the rates of learned scales that are not those of the weights (see `TensorQuantizer.stale_rate`)."""
    stale = [(q, weight) for q, weight in _weights(gm) if isinstance(q, TensorQuantizer) and q.stale_rate]
    values = values_of([weight for _, weight in stale])
    for quantizer, weight in stale:
        quantizer.set_weight_rate(values[weight], values[weight])


def sources(gm: fx.GraphModule) -> list[Tensor]:
    """Return the parameters and buffers on which the weights depend."""
    needed = set(reached((weight for _, weight in _weights(gm)), lambda node: node.all_input_nodes))
    tensors = [attrgetter(str(node.target))(gm) for node in gm.graph.nodes if node in needed and node.op == "get_attr"]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _weights(gm: fx.GraphModule) -> Iterator[tuple[Quantizer, fx.Node]]:
    """Yield each quantizer of a weight, with the node that computes the weight."""
    for node in gm.graph.nodes:
        module = module_of(node) if is_weight_quantizer(node) else None
        if isinstance(module, Quantizer):
            yield module, node.all_input_nodes[0]
