"""The rule that holds for a node of a graph: from the one resolver, or from the target."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.graph.nodes import kind_of, name_of, object_type_of, tensor_inputs
from qtoolkit.graph.placement.returned import left_as_returned
from qtoolkit.layer_rules import LayerRules, Rule
from qtoolkit.op_kinds.reached import reached
from qtoolkit.quantizers.table import QUANTIZERS


def rule_of_node(node: fx.Node, rules: LayerRules) -> Rule:
    """Return the rule for a node. A rule of the target may leave a layer in float that no explicit rule names.

    Raises ValueError: its module has several names, and the mapping has different configs for them.
    """
    is_module, backend = node.op == "call_module", rules.backend
    names = rules.names_of(name_of(node)) if is_module else (node.name,)
    rule = rules.find(names, object_type_of(node), None if is_module else _scope_of(node))
    left = None if rule.is_explicit or rule.qconfig is None else left_as_returned(node, backend)
    if left is not None:
        return replace(rule, qconfig=None, left=left)
    if rule.is_general and backend.end_bits is not None:
        return replace(rule, qconfig=with_least_bits(node, rule.qconfig, backend.end_bits))
    return rule


def _scope_of(node: fx.Node) -> str:
    """Return the dotted name of the submodule whose forward calls a function or method, as torch.fx records it."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


# ---- the first and the last layers of a graph, which some targets quantize with more bits


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
