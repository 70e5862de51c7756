"""Which quantizer's grid a tensor of a prepared or converted graph lies on."""

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.graph.placement.roles import is_quantizer, role_of, source_of
from qtoolkit.op_kinds.nodes import tensor_inputs


def quantizer_behind(node: fx.Node, backend: Backend) -> fx.Node | None:
    """Return the quantizer node that a tensor comes from, through ops that only move values; None where it is float.

    Of a concat whose inputs share a scale, the first input's.
    """
    while True:
        if is_quantizer(node):
            return node
        role = role_of(node, backend)
        if role == "concat":
            return _of_concat(node, backend)
        source = source_of(node) if role == "transparent" else None
        if source is None:
            return None
        node = source


def _of_concat(node: fx.Node, backend: Backend) -> fx.Node | None:
    found = [quantizer_behind(source, backend) for source in tensor_inputs(node)]
    quantizers = [quantizer for quantizer in found if quantizer is not None]
    one_grid = len(quantizers) == len(found) and len({quantizer.target for quantizer in quantizers}) == 1
    return quantizers[0] if one_grid else None
