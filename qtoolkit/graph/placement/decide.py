"""Decide which edges are quantized, by roles alone, once for the whole graph; nothing is changed here."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch import fx

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.graph.placement.masked_attention import MASKED, are_masked_scores
from qtoolkit.graph.placement.residual import free_branch, fuses
from qtoolkit.graph.placement.roles import HEADS, Roles, quantizes_its_input, role_of, weight_is_float
from qtoolkit.op_kinds.nodes import MULTIPLYING_KINDS, kind_of, tensor_inputs
from qtoolkit.op_kinds.rules import argument, written_out
from qtoolkit.op_kinds.table import MOVES

NOT_NEGATIVE = ("relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "softplus")
STAY_SO = ("avg_pool", "mean", "upsample_linear", "add", "mul", "div", "cat", "stack")
WITH_CONSTANT = ("scale", "shift")
NEEDS_OUTPUT = "float: its output is taken in float, and {} computes it in integers only between two quantized tensors"


@dataclass(frozen=True)
class Want:
    """A tensor that an op wants quantized.

    Attributes:
        anchor: The op that makes the tensor: the quantizer comes right after it; or a concat, whose inputs are quantized.
        through: The ops that only move values between it and the consumer.
        consumer: The op that wants it.
        spec: How the consumer's config quantizes it.
        why: The rule.
    """

    anchor: fx.Node
    through: tuple[fx.Node, ...]
    consumer: fx.Node
    spec: QuantSpec
    why: str


@dataclass(frozen=True)
class Group:
    """Tensors with one quantizer between them.

    Attributes:
        name: The concat that ties them, or the one tensor's node.
        anchors: The ops that make them.
        spec: The finest that a consumer asks for, unsigned where none of them is ever negative and the target allows it.
        wants: Who wants them.
    """

    name: str
    anchors: tuple[fx.Node, ...]
    spec: QuantSpec
    wants: tuple[Want, ...]


@dataclass
class Decisions:
    """What is quantized, and why an op that could be is not.

    Attributes:
        groups: The activation quantizers.
        weights: Weights of functions, each on its way into its op.
        left: Of each op left in float by a rule of the target, the reason.
    """

    groups: list[Group] = field(default_factory=list)
    weights: list[Want] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def run(roles: Roles, graph: fx.Graph) -> Decisions:
    """Decide on every edge, from the outputs back, so that an op knows whether its output will be quantized."""
    collector = _Collector(roles)
    for node in reversed(graph.nodes):
        if node.op == "output":
            collector.take_outputs(node)
        elif node not in roles.head:
            collector.take_weights(node)
            if roles[node] in HEADS:
                collector.take(node)
    unsigned = _never_negative(graph) if roles.backend.unsigned_after_relu else set()
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups = sorted(collector.groups(unsigned), key=lambda group: order[group.anchors[0]])
    return Decisions(groups, collector.weights, collector.left)


class _Collector:
    """Collects wants, from the last op to the first."""

    def __init__(self, roles: Roles) -> None:
        self.roles, self.backend = roles, roles.backend
        self.wants: dict[tuple[fx.Node, fx.Node], Want] = {}
        self.weights: list[Want] = []
        self.left: dict[str, str] = {}
        self.tied: dict[fx.Node, fx.Node] = {}  # union-find over anchors: each one's parent
        self.on_grid: set[fx.Node] = set()  # tensors that will be quantized

    def take_outputs(self, output: fx.Node) -> None:
        """Quantize what the graph returns, where the policy says so and a quantized op makes it."""
        for source in output.all_input_nodes if self.backend.quantize_graph_outputs else ():
            head = self._head(source)
            qconfig = None if head is None else self._quantized_by(head)
            if qconfig is not None and qconfig.activation is not None:
                self.want(source, output, qconfig.activation, "a graph output, which the target returns as integers")

    def take(self, node: fx.Node) -> None:
        """Collect what one op wants."""
        qconfig = self._quantized_by(node)
        if qconfig is None or qconfig.activation is None:
            return
        if self.roles[node] != "concat":
            reason = self._reason_left(node)
            if reason is not None:
                self.left[node.name] = reason
                return
            if not quantizes_its_input(node):
                self._take_inputs(node, qconfig)
        if self.backend.quantize_outputs:
            self._take_users(node, qconfig.activation)

    def take_weights(self, node: fx.Node) -> None:
        """Collect the weights of an op that is called as a function; they are quantized with or without its other inputs."""
        qconfig = self.roles.config(node)
        if qconfig is None or qconfig.weight is None or not self._multiplies_on_target(node):
            return
        for weight in self.roles.weights_of(node):
            spec = qconfig.weight
            if self.roles.rule(node) is None:
                spec = _on_output_channels(node, weight, spec, self.backend.conv_transpose_axis)
            self.weights.append(Want(weight, (), node, spec, f"weight of a {kind_of(node)} called as a function"))

    def want(self, source: fx.Node, consumer: fx.Node, spec: QuantSpec, why: str) -> fx.Node | None:
        """Note that a consumer wants a tensor quantized; return the anchor."""
        through: list[fx.Node] = []
        while (moved := self.roles.moves_from(source)) is not None:
            through.append(source)
            source = moved
        if source.op == "placeholder" and not self.backend.quantize_graph_inputs:
            return None
        self.on_grid.update(through, (source,))
        known = self.wants.get((source, consumer))
        if known is not None:
            through = list(dict.fromkeys([*known.through, *through]))
            spec, why = max(known.spec, spec, key=lambda s: s.bits), known.why
        self.wants[source, consumer] = Want(source, tuple(through), consumer, spec, why)
        if self.roles[source] == "concat" and known is None:
            self._tie(source, spec)
        return source

    def groups(self, unsigned: set[fx.Node]) -> list[Group]:
        """Return the quantizers: one for each anchor, or for all that concats tie together."""
        by_root: dict[fx.Node, list[Want]] = defaultdict(list)
        for want in reversed(self.wants.values()):
            by_root[self._root(want.anchor)].append(want)
        groups = [self._group(wants, unsigned) for wants in by_root.values()]
        return [group for group in groups if group.anchors]

    def _group(self, wants: list[Want], unsigned: set[fx.Node]) -> Group:
        anchors = list(dict.fromkeys(want.anchor for want in wants))
        made = [anchor for anchor in anchors if self.roles[anchor] != "concat"]
        name = next((anchor.name for anchor in anchors if anchor not in made), anchors[0].name)
        spec = max((want.spec for want in wants), key=lambda s: s.bits)
        if spec.signed and spec.symmetric and unsigned.issuperset(made):
            spec = replace(spec, signed=False, narrow=False)
        return Group(name, tuple(made), spec, tuple(wants))

    # ---- what an op wants

    def _multiplies_on_target(self, node: fx.Node) -> bool:
        """Return whether an op's weights can be quantized: the target has it, or a rule of the user's own asks for it."""
        return role_of(node, self.backend) in HEADS or self.roles.rule(node) is not None

    def _quantized_by(self, node: fx.Node) -> QConfig | None:
        """Return the config of an op that is to be quantized, None of others."""
        if self.roles[node] not in HEADS or weight_is_float(node):
            return None
        qconfig = self.roles.config(node)
        # A function whose weight stays float computes in float, as a layer does.
        return None if qconfig is None or (self.roles.weights_of(node) and qconfig.weight is None) else qconfig

    def _reason_left(self, node: fx.Node) -> str | None:
        """Return why an op stays in float by a rule of the target; a rule of the user's own holds against all of them."""
        if self.roles.rule(node) is not None:
            return None
        if are_masked_scores(node, self.roles):
            return MASKED
        return NEEDS_OUTPUT.format(self.backend.name) if self._needs_output(node) else None

    def _needs_output(self, node: fx.Node) -> bool:
        exempt = (*MULTIPLYING_KINDS, "attention", *(("add",) if self.backend.residual_add == "both" else ()))
        if not self.backend.integers_in_and_out or kind_of(node) in exempt:
            return False
        return self.roles.end_of(node) not in self.on_grid and not fuses(node, self.roles)

    def _take_inputs(self, node: fx.Node, qconfig: QConfig) -> None:
        free, weights = free_branch(node, self.roles), self.roles.weights_of(node)
        for source in tensor_inputs(node):
            if kind_of(node) in WITH_CONSTANT and source in self.roles.parameters:
                continue
            if source not in weights and source is not free and qconfig.activation is not None:
                self.want(source, node, qconfig.activation, self._why(node, free))

    def _why(self, node: fx.Node, free: fx.Node | None) -> str:
        if free is not None:
            return f"identity branch of a residual add, which becomes part of {free.name}"
        words = "computes on" if self.roles[node] == "compute" else "merges"
        return f"{kind_of(node)} {words} quantized inputs"

    def _take_users(self, node: fx.Node, spec: QuantSpec) -> None:
        end = self.roles.end_of(node)
        for user in end.users:
            if user.op != "output" and (end, user) not in self.wants:
                self.want(
                    end, user, spec, f"output of {node.name}: {self.backend.name} computes in integers throughout"
                )

    def _head(self, source: fx.Node) -> fx.Node | None:
        while (moved := self.roles.moves_from(source)) is not None:
            source = moved
        return self.roles.head.get(source, source)

    # ---- concats

    def _tie(self, concat: fx.Node, spec: QuantSpec) -> None:
        for source in tensor_inputs(concat):
            anchor = self.want(source, concat, spec, f"shares the scale of {concat.name}")
            if anchor is not None:
                self.tied[self._root(anchor)] = self._root(concat)

    def _root(self, anchor: fx.Node) -> fx.Node:
        while (parent := self.tied.get(anchor, anchor)) is not anchor:
            anchor = parent
        return anchor


def _on_output_channels(node: fx.Node, weight: fx.Node, spec: QuantSpec, conv_transpose_axis: int) -> QuantSpec:
    """Return a weight's spec with the axis of the op's output channels, for which axis 0 stands in a general config."""
    if spec.axis != 0:
        return spec
    if kind_of(node) == "conv_transpose":
        return replace(spec, axis=conv_transpose_axis)
    if kind_of(node) != "matmul":
        return spec
    if isinstance(node.args[0] if node.args else None, str):
        return replace(spec, axis=_einsum_axis(node, weight))
    return replace(spec, axis=-1 if weight is not tensor_inputs(node)[0] else -2)


def _einsum_axis(node: fx.Node, weight: fx.Node) -> int | None:
    """Return the axis of the last letter that only this operand and the result have; None, a single scale, without one."""
    equation = written_out(str(node.args[0]))
    terms = equation.split("->")[0].split(",")
    operands = node.args[1:]
    mine = terms[operands.index(weight)]
    other = terms[1 - operands.index(weight)]
    own = [] if "." in equation else [i for i, letter in enumerate(mine) if letter not in other]
    return own[-1] if own else None


def conv_groups(node: fx.Node, spec: QuantSpec) -> int:
    """Return the groups whose output channels have scales of their own: those of a transposed convolution along axis 1."""
    along_outputs = kind_of(node) == "conv_transpose" and spec.axis == 1
    return int(argument(node, 6, "groups", 1)) if along_outputs else 1


def _never_negative(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        kind = kind_of(node)
        keeps = kind in (*STAY_SO, *MOVES) and found.issuperset(tensor_inputs(node))
        if kind in NOT_NEGATIVE or keeps:
            found.add(node)
    return found
