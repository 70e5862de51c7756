"""Read a graph once: the role of each op on a target, and which ops form one unit."""

from torch import fx

from qtoolkit.backends import Backend, Role
from qtoolkit.config import QConfig, QConfigMapping
from qtoolkit.config.mapping import Match
from qtoolkit.graph.passes.swap import config_of, name_of
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.nodes import (
    MULTIPLYING_KINDS,
    OTHER,
    WEIGHTED_KINDS,
    kind_of,
    module_of,
    object_type_of,
    parameters_in,
    tensor_inputs,
)
from qtoolkit.op_kinds.rules import gives_tuple
from qtoolkit.quantizers.tensor_quantizer import HOLDER, WEIGHT_HOLDER

HEADS = ("compute", "merge", "concat")


def role_of(node: fx.Node, backend: Backend) -> Role:
    """Return a node's role on a backend; what it does not name is "float"."""
    role = backend.roles.get(kind_of(node), "float")
    return "merge" if role == "concat" and not backend.shared_concat else role


def is_quantizer(node: fx.Node) -> bool:
    """Return whether a node is a quantizer that the insert pass put there."""
    return node.op == "call_module" and str(node.target).startswith((HOLDER + ".", WEIGHT_HOLDER + "."))


def is_weight_quantizer(node: fx.Node) -> bool:
    """Return whether a node is the quantizer of a function's weight."""
    return is_quantizer(node) and str(node.target).startswith(WEIGHT_HOLDER + ".")


def weight_is_float(node: fx.Node) -> bool:
    """Return whether a node is a layer whose weight stays float."""
    if node.op != "call_module" or kind_of(node) not in (*WEIGHTED_KINDS, "attention"):
        return False
    layer = module_of(node)
    return not isinstance(layer, QuantModule) or not layer.weight_quantizers()


def quantizes_its_input(node: fx.Node) -> bool:
    """Return whether a node is a layer with a quantizer of its input: it is called in a submodule kept whole, too."""
    return node.op == "call_module" and getattr(module_of(node), "input_quantizer", None) is not None


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose values an op with one input moves or changes; None where that is no tensor to quantize."""
    inputs = tensor_inputs(node)
    return inputs[0] if inputs else None


def _through_identities(node: fx.Node) -> fx.Node | None:
    """Return what an op with one input takes, where no other takes it, through dropout and the like."""
    while True:
        source = source_of(node)
        if source is None or len(source.users) != 1 or kind_of(source) != "identity":
            return source if source is not None and len(source.users) == 1 else None
        node = source


class Roles:
    """The roles of a graph's ops, by the backend's table and the user's rules, and the units that ops form.

    A rule by name, regex or type that says None makes an op float; one with a config makes a float op "compute" (a regex only
    ops of a known kind). A unit is an op with the batch norm and the activation that alone follow it: one op on the target.

    Attributes:
        parameters: Nodes computed from parameters alone.
        head: Of each batch norm and activation in a unit, the op that the unit begins with.
        end: Of each unit's first op, its last.
    """

    def __init__(self, gm: fx.GraphModule, backend: Backend, mapping: QConfigMapping | None = None) -> None:
        self.backend, self.mapping = backend, mapping
        self.parameters = parameters_in(gm.graph)
        self.roles = {node: self._by_rule(node, role_of(node, backend)) for node in gm.graph.nodes}
        self.head: dict[fx.Node, fx.Node] = {}
        self.end: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            self._join_unit(node)

    def __getitem__(self, node: fx.Node) -> Role:
        role = self.roles[node]
        if node in self.head:
            return "activation"
        # An activation of its own is an op like others to a target that computes in integers throughout.
        return "compute" if role == "activation" and self.backend.quantize_outputs else role

    def config(self, node: fx.Node) -> QConfig | None:
        """Return the config that holds for a node."""
        return config_of(node, self.backend, self.mapping)

    def rule(self, node: fx.Node) -> Match | None:
        """Return the user's rule for a node by name, regex or type, or None."""
        match = None if self.mapping is None else self.mapping.match(name_of(node), object_type_of(node))
        return None if match is None or match.source == "global" else match

    def end_of(self, node: fx.Node) -> fx.Node:
        """Return the last op of the unit that begins with a node."""
        return self.end.get(node, node)

    def weights_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a multiplying function that are weights."""
        if node.op == "call_module" or kind_of(node) not in MULTIPLYING_KINDS:
            return []
        inputs = tensor_inputs(node)
        weights = [source for source in inputs if source in self.parameters]
        return weights if len(weights) < len(inputs) else []

    def moves_from(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose values a transparent op moves; None for other ops, and where that is no tensor.

        A max pool takes what was padded with -inf without its padding.
        """
        source = source_of(node) if self[node] == "transparent" else None
        if source is not None and kind_of(node) == "max_pool" and kind_of(source) == "pad":
            return None
        return None if source is None or (gives_tuple(source) and self[source] != "transparent") else source

    def _by_rule(self, node: fx.Node, role: Role) -> Role:
        rule = self.rule(node)
        if rule is None or node.op in ("placeholder", "output", "get_attr") or role == "activation":
            return role
        if rule.qconfig is None or rule.qconfig.activation is None:
            return "float"
        included = rule.source != "module_name_regex" or kind_of(node) != OTHER
        return "compute" if role == "float" and included else role

    def _join_unit(self, node: fx.Node) -> None:
        is_norm = kind_of(node) == "batch_norm"
        if not is_norm and self.roles[node] != "activation":
            return
        source = _through_identities(node)
        if source is None or self.roles[source] == "activation":
            return
        starts = kind_of(source) in WEIGHTED_KINDS if is_norm else self._can_lead(source)
        if starts:
            head = self.head.get(source, source)
            self.head[node], self.end[head] = head, node

    def _can_lead(self, node: fx.Node) -> bool:
        return self.roles[node] in HEADS or kind_of(node) in (*WEIGHTED_KINDS, "batch_norm")
