"""Decide which edges are quantized, by roles alone, once for the whole graph. Nothing is changed here."""

from collections import defaultdict
from dataclasses import dataclass, replace

from torch import fx

from qtoolkit.backends import QUANTIZED_ROLES
from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.errors import with_article
from qtoolkit.graph.nodes import (
    has_float_weight,
    is_discrete,
    is_output,
    kind_of,
    may_be_packed,
    name_of,
    outputs_of,
    owner_of,
    quantizes_its_input,
    returns_tuple,
    tensor_inputs,
    users_of,
)
from qtoolkit.graph.placement.returned import float_output, is_returned
from qtoolkit.graph.placement.roles import Roles
from qtoolkit.graph.placement.view import ops_of
from qtoolkit.lint.masked_attention import MASKED, are_masked_scores
from qtoolkit.lint.ops import WeightFacts
from qtoolkit.lint.residual import free_branch, fuses
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.rules import written_out
from qtoolkit.verdicts import Verdict

# Runtimes whose product takes one scale of a batch of matrices: with several, onnxruntime's fails
# (cpu/quantization/quantize_linear_matmul.cc), and OpenVINO 2026.4 returns what its memory held before.
ONE_SCALE_OF_A_BATCH = ("onnxruntime", "openvino")


@dataclass(frozen=True)
class Request:
    """An op's request for a quantized tensor."""

    # the op that computes the tensor, which the quantizer follows; or a concat, whose inputs are quantized
    producer: fx.Node
    through: tuple[fx.Node, ...]  # the ops that only move values between the producer and the consumer
    consumer: fx.Node  # the op that asks
    spec: QuantSpec  # how the consumer's config quantizes it
    why: str  # the rule


@dataclass(frozen=True)
class PlannedQuantizer:
    """One quantizer, and the tensors that it quantizes."""

    name: str  # the name of the tensor's node, or of the concat whose inputs share the quantizer
    producers: tuple[fx.Node, ...]  # the ops that compute the tensors
    # the spec with most bits that a consumer asks for; unsigned where no tensor is ever negative and the target allows it
    spec: QuantSpec
    requests: tuple[Request, ...]  # the requests that it serves


def run(roles: Roles, graph: fx.Graph) -> tuple[list[PlannedQuantizer], list[Request], dict[str, Verdict]]:
    """Decide on every edge, from the outputs back: then it is known of each op whether its output will be quantized.

    Returns the quantizers of activations, the weights of functions, and the verdict on each op that a rule of the target leaves
    in float, by its name.
    """
    collector = _Collector(roles, graph)
    for node in reversed(graph.nodes):
        if is_output(node):
            collector.take_outputs(node)
        elif node not in roles.unit:
            collector.take_weights(node)
            if roles[node] in QUANTIZED_ROLES:
                collector.take(node)
    unsigned = _never_negative(graph) if roles.backend.unsigned_after_relu else set()
    order = {node: i for i, node in enumerate(graph.nodes)}
    quantizers = sorted(collector.quantizers(unsigned), key=lambda quantizer: order[quantizer.producers[0]])
    return quantizers, collector.weights, collector.left


class _Collector:
    """Collects requests, from the last op to the first."""

    def __init__(self, roles: Roles, graph: fx.Graph) -> None:
        self.roles, self.backend = roles, roles.backend
        self.op_of = {op.node: op for op in ops_of(graph, self._weight_of)}  # as the rules of targets read them
        self.requests: dict[tuple[fx.Node, fx.Node], Request] = {}
        self.weights: list[Request] = []
        self.left: dict[str, Verdict] = {}
        self.shares_with: dict[fx.Node, fx.Node] = {}  # union-find over producers: each one's parent
        self.on_grid: set[fx.Node] = set()  # tensors that will be quantized

    def take_outputs(self, output: fx.Node) -> None:
        """Quantize what the graph returns, where the target says so and a quantized op computes it."""
        for source in output.all_input_nodes if self.backend.quantize_graph_outputs else ():
            qconfig = self._quantized_by(self._first_in_unit(source))
            if qconfig is not None and qconfig.activation is not None:
                self.request(source, output, qconfig.activation, "a graph output, which the target returns as integers")

    def take(self, node: fx.Node) -> None:
        qconfig = self._quantized_by(node)
        if qconfig is None or qconfig.activation is None:
            return
        if self.roles[node] != "concat":
            verdict = self._left_by_target(node)
            if verdict is not None:
                self.left[node.name] = verdict
                return
            if not quantizes_its_input(node):
                self._take_inputs(node, qconfig.activation)
        if facts_of(node).in_training:
            return
        if self.backend.quantize_outputs:
            self._take_users(node, qconfig.activation, "computes in integers throughout")
            if kind_of(node).name in self.backend.same_grid and not facts_of(node).training_alone:
                self._join_input_and_output(node)
        elif kind_of(node).name in self.backend.needs_quantized_output and not is_returned(node, self.backend):
            self._take_users(node, qconfig.activation, "computes it in integers only with a quantized output")

    def take_weights(self, node: fx.Node) -> None:
        """Collect the weights of an op called as a function; they are quantized with or without its other inputs."""
        spec, kind = self._weight_spec(node), kind_of(node)
        if spec is None:
            return
        for weight in self.roles.weights_of(node):
            self.weights.append(Request(weight, (), node, spec, f"weight of {with_article(kind)} called as a function"))

    def _weight_spec(self, node: fx.Node) -> QuantSpec | None:
        rule, kind = self.roles.rule(node), kind_of(node)
        return self.roles.rules.weight_spec(rule, kind) if self.backend.quantizes(kind) or rule.is_explicit else None

    def _weight_of(self, node: fx.Node) -> WeightFacts | None:
        spec = self._weight_spec(node)
        return None if spec is None else WeightFacts(spec.bits, spec.axis, spec.group_size is not None)

    def request(self, source: fx.Node, consumer: fx.Node, spec: QuantSpec, why: str) -> fx.Node | None:
        """Note that a consumer asks for a quantized tensor; return its producer."""
        through: list[fx.Node] = []
        while (moved := self.roles.moves_from(source)) is not None:
            through.append(source)
            source = moved
        free = source.op == "placeholder" and not self.backend.quantize_graph_inputs
        packed = kind_of(owner_of(source)).keeps_state and may_be_packed(source)
        if free or packed or returns_tuple(source) or is_discrete(source):
            return None
        if facts_of(source).training_alone or not facts_of(consumer).training_alone:
            self.on_grid.update(through, (source,))
        known = self.requests.get((source, consumer))
        if known is not None:
            through = list(dict.fromkeys([*known.through, *through]))
            spec, why = max(known.spec, spec, key=lambda s: s.bits), known.why
        self.requests[source, consumer] = Request(source, tuple(through), consumer, spec, why)
        if self.roles[source] == "concat" and known is None:
            self._share(source, spec)
        return source

    def quantizers(self, unsigned: set[fx.Node]) -> list[PlannedQuantizer]:
        """Return the quantizers: one for each producer, or for all whose tensors concats join."""
        by_root: dict[fx.Node, list[Request]] = defaultdict(list)
        for request in reversed(self.requests.values()):
            by_root[self._root(request.producer)].append(request)
        planned = [self._planned(requests, unsigned) for requests in by_root.values()]
        return [quantizer for quantizer in planned if quantizer.producers]

    def _planned(self, requests: list[Request], unsigned: set[fx.Node]) -> PlannedQuantizer:
        producers = list(dict.fromkeys(request.producer for request in requests))
        made = [producer for producer in producers if self.roles[producer] != "concat"]
        name = next((producer.name for producer in producers if producer not in made), producers[0].name)
        spec = max((request.spec for request in requests), key=lambda s: s.bits)
        if spec.format == "int" and spec.signed and spec.symmetric and unsigned.issuperset(made):
            spec = replace(spec, signed=False, narrow=False)
        fixed = self._fixed_by_target(made)
        if fixed is not None and fixed.bits == spec.bits:
            spec = fixed
        return PlannedQuantizer(name, tuple(made), spec, tuple(requests))

    def _fixed_by_target(self, producers: list[fx.Node]) -> QuantSpec | None:
        """Return the spec that the target fixes for all these tensors of one scale; None where it fixes none, or some."""
        kinds = [kind_of(producer).name for producer in producers]
        specs = [self.backend.output_specs.get(kind) for kind in kinds if kind not in self.backend.same_grid]
        return specs[0] if specs and all(spec == specs[0] for spec in specs) else None

    # ---- what an op asks for

    def _quantized_by(self, node: fx.Node) -> QConfig | None:
        """Return the config of an op that is to be quantized, None for others."""
        if self.roles[node] not in QUANTIZED_ROLES or has_float_weight(node):
            return None
        qconfig = self.roles.rule(node).qconfig
        # A function whose weight stays float computes in float, as a layer does.
        return None if qconfig is None or (self.roles.weights_of(node) and qconfig.weight is None) else qconfig

    def _left_by_target(self, node: fx.Node) -> Verdict | None:
        """Return the verdict on an op that a rule of the target leaves in float; an explicit rule of the user's wins."""
        if self.roles.has_rule(node) or facts_of(node).in_training:
            return None
        if are_masked_scores(self.op_of[node], lambda softmax: self.roles[softmax.node] == "float"):
            return MASKED
        if self.backend.quantize_outputs or not self.backend.is_float_without_quantized_output(kind_of(node)):
            return None
        has_one = self.roles.last_in_unit(node) in self.on_grid or fuses(self.op_of[node], self.backend)
        return None if has_one else float_output(self.backend)

    def _take_inputs(self, node: fx.Node, spec: QuantSpec) -> None:
        branch, weights = free_branch(self.op_of[node], self.backend), self.roles.weights_of(node)
        free = None if branch is None else branch.node
        for source in tensor_inputs(node):
            is_constant = kind_of(node).with_constant and source in self.roles.parameters
            if not is_constant and source not in weights and source is not free:
                self.request(source, node, spec, self._why(node, free))

    def _why(self, node: fx.Node, free: fx.Node | None) -> str:
        if free is not None:
            return f"identity branch of a residual add, which becomes part of {name_of(free)}"
        words = "computes on" if self.roles[node] == "compute" else "merges"
        return f"{kind_of(node)} {words} quantized inputs"

    def _take_users(self, node: fx.Node, spec: QuantSpec, how: str) -> None:
        why = f"output of {name_of(node)}: {self.backend.name} {how}"
        for output in outputs_of(self.roles.last_in_unit(node)):
            for user in users_of(output):
                returned = is_output(user) and self.backend.quantize_outputs  # see take_outputs
                if not returned and (output, user) not in self.requests:
                    self.request(output, user, spec, why)

    def _first_in_unit(self, source: fx.Node) -> fx.Node:
        source = self.roles.computing(source)
        return self.roles.unit.get(source, owner_of(source))

    # ---- tensors of one scale

    def _join_input_and_output(self, node: fx.Node) -> None:
        source = self.roles.computing(tensor_inputs(node)[0])
        ends = self._root(source), self._root(self.roles.last_in_unit(node))
        if ends[0] is not ends[1]:
            self.shares_with[ends[1]] = ends[0]

    def _share(self, concat: fx.Node, spec: QuantSpec) -> None:
        for source in tensor_inputs(concat):
            producer = self.request(source, concat, spec, f"shares the scale of {concat.name}")
            if producer is not None:
                self.shares_with[self._root(producer)] = self._root(concat)

    def _root(self, producer: fx.Node) -> fx.Node:
        while (parent := self.shares_with.get(producer, producer)) is not producer:
            producer = parent
        return producer


def spec_of_weight(request: Request, roles: Roles, dims: int) -> QuantSpec:
    """Return the spec of a function's weight of `dims` dimensions: in a matrix product, axis 0 stands for the outputs.

    These are its columns; its rows, if it is the first operand. A vector has none. A rule that names the function
    names an axis of the weight itself.
    """
    node, weight, spec = request.consumer, request.producer, request.spec
    if spec.axis != 0 or not kind_of(node).of_two_matrices or roles.rule(node).says_axis:
        return spec
    if isinstance(node.args[0] if node.args else None, str):
        # onnxruntime computes an Einsum in float, with any scales; OpenVINO makes products of it.
        of_batches = spec.group_size is not None or roles.backend.runtime != "openvino"
        return replace(spec, axis=_einsum_axis(node, weight, of_batches))
    is_first = weight is tensor_inputs(node)[0]
    is_refused_batch = dims > 2 and not is_first and roles.backend.runtime in ONE_SCALE_OF_A_BATCH
    has_one = spec.group_size is None and (dims < 2 or is_refused_batch)
    return replace(spec, axis=None if has_one else -2 if is_first else -1)


def _einsum_axis(node: fx.Node, weight: fx.Node, of_batches: bool) -> int | None:
    """Return the axis of the last letter that this operand shares with the result alone; None (one scale) without one.

    Also where letters of a batch are in both operands and the result, unless products of batches take several scales.
    """
    equation = written_out(str(node.args[0]))
    operands_of, result = equation.split("->")
    terms = operands_of.split(",")
    operands = node.args[1:]
    mine = terms[operands.index(weight)]
    other = terms[1 - operands.index(weight)]
    one = "." in equation or (not of_batches and bool({*mine} & {*other} & {*result}))
    own = [] if one else [i for i, letter in enumerate(mine) if letter not in other]
    return own[-1] if own else None


def _never_negative(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        kind = kind_of(node)
        if kind.never_negative or (kind.keeps_sign and found.issuperset(tensor_inputs(node))):
            found.add(node)
    return found
