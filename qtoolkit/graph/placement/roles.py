"""The role of each op of a graph on a target, and the units of ops that the target computes as one."""

from torch import fx

from qtoolkit.backends import QUANTIZED_ROLES, Role
from qtoolkit.graph.nodes import is_discrete, kind_of, parameters_in, returns_tuple, tensor_inputs
from qtoolkit.graph.placement.rule_of_node import rule_of_node
from qtoolkit.graph.placement.traversal import computed_by, source_of
from qtoolkit.layer_rules import LayerRules, Rule
from qtoolkit.lint.ops import takes_into_unit
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.rules import called_module
from qtoolkit.op_kinds.table import NO_OPS, OTHER


class Roles:
    """The role of each op of a graph, by the backend's table and the user's rules, and the units that ops form.

    A user's rule with config None makes an op float. A rule that names an op itself, with a config, makes a float op
    "compute" (a regular expression only ops of a known kind). A unit is an op with the batch norm and the activation that
    follow it and have no other input: one op on the target.
    """

    def __init__(self, graph: fx.Graph, rules: LayerRules) -> None:
        self.rules, self.backend = rules, rules.backend
        self.parameters = parameters_in(graph)  # nodes computed from parameters alone
        self._rule_of = {node: rule_of_node(node, rules) for node in graph.nodes if node.op not in NO_OPS}
        self._role_of = {node: self._by_rule(node) for node in graph.nodes}
        # the first op of the unit of each batch norm and activation that is in one
        self.unit: dict[fx.Node, fx.Node] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            self._join_unit(node)

    def __getitem__(self, node: fx.Node) -> Role:
        role = self._role_of[node]
        if node in self.unit:
            return "activation"
        # An activation outside a unit is an op like others to a target that computes in integers throughout.
        asks = (self.backend.quantize_outputs or self.is_behind_codes(node)) and not self._is_constant(node)
        return "compute" if role == "activation" and asks else role

    def is_behind_codes(self, node: fx.Node) -> bool:
        """Return whether an activation comes after an op that needs a quantized output and does not join it."""
        first = self._head(node) if self._role_of[node] == "activation" else None
        return first is not None and self._role_of[first] in QUANTIZED_ROLES and not self._joins(first, node)

    def rule(self, node: fx.Node) -> Rule:
        """Return the rule that holds for a node."""
        return self._rule_of[node] if node in self._rule_of else rule_of_node(node, self.rules)

    def has_rule(self, node: fx.Node) -> bool:
        """Return whether a rule of the user's names an op itself: it holds against the target's rules."""
        return self.rule(node).is_explicit

    def last_in_unit(self, node: fx.Node) -> fx.Node:
        """Return the last op of the unit that begins with a node."""
        return self._last.get(node, node)

    def weights_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a function that are weights: computed from parameters, where another input is not."""
        if node.op == "call_module" or not kind_of(node).weight_argument:
            return []
        inputs = tensor_inputs(node)
        weights = [source for source in inputs if source in self.parameters]
        return weights if len(weights) < len(inputs) else []

    def moves_from(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose values a transparent op moves; None for other ops, and where it moves no tensor.

        A max pool after padding with -inf takes its input with the padding, which no quantizer represents.
        """
        source = source_of(node) if self[node] == "transparent" else None
        if source is not None and kind_of(node).takes_maxima and kind_of(source).pads_off_grid:
            return None
        return None if source is None or (returns_tuple(source) and self[source] != "transparent") else source

    def computing(self, node: fx.Node) -> fx.Node:
        """Return the op that computes the values of a node, back through ops that move them."""
        while (moved := self.moves_from(node)) is not None:
            node = moved
        return node

    def _by_rule(self, node: fx.Node) -> Role:
        role, kind = self.backend.role(kind_of(node)), kind_of(node)
        if kind.keeps_state and isinstance(called_module(node), QuantModule):
            role = "compute"  # it has no op in a backend's table: its matrix products do
        facts = facts_of(node)
        # No target computes these ops; layers train with quantized inputs. Eval mode decides which scales are one.
        if (facts.in_training and not kind.has_weight) or (facts.training_alone and role == "concat"):
            return "float"
        if role in QUANTIZED_ROLES and self._is_constant(node):
            return "float"
        if role in QUANTIZED_ROLES and not self.has_rule(node) and any(map(is_discrete, tensor_inputs(node))):
            return "float"
        if node.op in NO_OPS or role == "activation" or self.rule(node).is_general:
            return role
        rule = self.rule(node)
        if rule.qconfig is None or rule.qconfig.activation is None:
            return "float"
        included = rule.is_explicit and (rule.source != "module_name_regex" or kind is not OTHER)
        return "compute" if role == "float" and included else role

    def _is_constant(self, node: fx.Node) -> bool:
        """Return whether targets compute an op once, in float: it takes parameters alone, and no rule names it."""
        return node in self.parameters and not self.has_rule(node)

    def _join_unit(self, node: fx.Node) -> None:
        is_norm = kind_of(node).normalizes_batches
        source = source_of(node) if is_norm or self._role_of[node] == "activation" else None
        first = None if source is None else computed_by(source, quantizers=False, sole_user=True)
        if first is None or self._role_of[first] == "activation":
            return
        head = self.unit.get(first, first)
        if (is_norm or self._starts_unit(first)) and self._joins(first if is_norm else head, node):
            self.unit[node], self._last[head] = head, node

    def _joins(self, first: fx.Node, follower: fx.Node) -> bool:
        return takes_into_unit(kind_of(first), kind_of(follower), self.backend)

    def _head(self, activation: fx.Node) -> fx.Node | None:
        """Return the first op of the unit that an activation takes the output of."""
        source = source_of(activation)
        before = None if source is None else computed_by(source)
        return None if before is None else self.unit.get(before, before)

    def _starts_unit(self, node: fx.Node) -> bool:
        return self._role_of[node] in QUANTIZED_ROLES or kind_of(node).layer or kind_of(node).normalizes_batches
