"""The first and the last layers of a graph, which some targets quantize with more bits."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.graph.nodes import kind_of, tensor_inputs
from qtoolkit.op_kinds.reached import reached
from qtoolkit.quantizers.table import QUANTIZERS


def with_least_bits(node: fx.Node, qconfig: QConfig | None, bits: int) -> QConfig | None:
    """Return the config of a node, with at least `bits` bits if it is a first or a last layer."""
    if qconfig is None or not _is_first_or_last(node):
        return qconfig
    return QConfig(_widen(qconfig.activation, bits), _widen(qconfig.weight, bits))


def _is_first_or_last(node: fx.Node) -> bool:
    """Return whether a layer takes a graph input, or makes a graph output, with no other layer in between."""
    if not kind_of(node).weight_argument:
        return False
    return _reaches(node, "placeholder", tensor_inputs) or _reaches(node, "output", lambda n: n.users)


def _reaches(start: fx.Node, op: str, step: Callable[[fx.Node], Iterable[fx.Node]]) -> bool:
    on_the_way = reached(step(start), lambda node: () if kind_of(node).weight_argument else step(node))
    return any(node.op == op for node in on_the_way)


def _widen(spec: QuantSpec | None, bits: int) -> QuantSpec | None:
    """Return the spec with more bits, by LSQ if its own quantizer does not have them."""
    if spec is None or spec.bits >= bits:
        return spec
    wide: Any = {"e2m1": "e4m3", "mxfp4": "mxfp8", "nvfp4": "mxfp8"}.get(spec.format, spec.format)
    if bits > QUANTIZERS[spec.quantizer].most_bits(spec):
        spec = replace(spec, quantizer="lsq", quantizer_args={})
    return replace(spec, bits=bits, format=wide, group_size=None if wide == "mxfp8" else spec.group_size)
