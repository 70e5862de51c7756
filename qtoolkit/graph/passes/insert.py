"""Insert quantizers: one on each tensor to be quantized, shared where concats join tensors; on weights of functions too."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from torch import fx, nn

from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.layer_quantizers import layer_edges
from qtoolkit.graph.nodes import QuantizerHolder, chooses_by_mode, is_output, is_quantizer, kind_of, readers_of
from qtoolkit.graph.placement import decide
from qtoolkit.graph.placement.decide import PlannedQuantizer, Request
from qtoolkit.graph.placement.roles import Roles
from qtoolkit.graph.plan import Edge, Plan
from qtoolkit.layer_rules import LayerRules
from qtoolkit.model_state import device_of
from qtoolkit.op_kinds.facts import facts_of, set_facts
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.rules import argument, is_number, reads_sizes
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.quantizers.weights import weight_quantizer

# The submodules of a prepared model that hold the quantizers of its graph's tensors, and of weights that functions take.
HOLDER, WEIGHT_HOLDER = "activation_quantizers", "weight_quantizers"


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Insert a quantizer on every tensor that the target wants quantized, one for all its consumers.

    The quantizer of node `relu` is the submodule `activation_quantizers.relu`; the one that the inputs of the concat
    `cat` share is `activation_quantizers.cat`; the weight of the function `linear` has `weight_quantizers.linear`. In a
    model with a submodule of such a name the quantizers are in `activation_quantizers_1`; a node `to`, which is the
    name of a method of modules, has `to_1`. If consumers ask for different specs, the spec with the most bits holds. A
    graph with inserted quantizers stays as it is. The plan gets every edge.

    Raises:
        ValueError: A spec does not fit a function's weight.
    """
    if not any(is_quantizer(node) for node in gm.graph.nodes):
        roles = Roles(gm.graph, rules)
        quantizers, of_functions, left = decide.run(roles, gm.graph)
        weights = list(
            _insert_weights(gm, roles, of_functions)
        )  # first: their values are computed by the graph as it is
        edges = [*_insert_activations(gm, quantizers), *weights, *layer_edges(gm)]
        plan = plan_in(gm) or Plan(rules.backend)
        gm.plan = replace(plan, status={**left, **plan.status}, edges=tuple(edges))
        gm.graph.lint()
        gm.recompile()
    return gm


def _insert_activations(gm: QuantizedGraphModule, planned: Sequence[PlannedQuantizer]) -> Iterator[Edge]:
    device = device_of(gm)
    holder = add_holder(gm, HOLDER) if planned else HOLDER
    for each in planned:
        target = f"{holder}.{free_name(gm.get_submodule(holder), each.name)}"
        quantizer = TensorQuantizer(each.spec, name=target, inserted=True)
        gm.add_submodule(target, quantizer.to(device).train(gm.training))
        for producer in each.producers:
            _insert_behind(gm, producer, target, [request for request in each.requests if request.producer is producer])
        for request in each.requests:
            yield Edge(request.producer.name, request.consumer.name, target, each.spec, request.why)


def _insert_behind(gm: QuantizedGraphModule, producer: fx.Node, target: str, requests: Iterable[Request]) -> None:
    """Insert calls of a quantizer for some requests: after their producer, or where training mode takes another value."""
    by_place: dict[fx.Node, set[fx.Node]] = defaultdict(
        set
    )  # what lies between each place and the consumers, and these
    for request in requests:
        way = (request.consumer, *request.through)
        end = next((i for i, node in enumerate(way) if _takes_another(node)), len(way))
        by_place[[*way, producer][end]].update(way[:end] or readers_of(request.consumer))
    for place, on_the_way in by_place.items():
        if any(map(chooses_by_mode, on_the_way)):  # training mode goes on from the same values
            on_the_way.update(user for user in place.users if facts_of(user).in_training)
        # Sizes are read of the quantizer's result too: so the op before it has no other user, and may be one op with it.
        on_the_way.update(user for user in place.users if reads_sizes(user))
        users = [user for user in place.users if user in on_the_way or (facts_of(user).in_training and is_number(user))]
        with gm.graph.inserting_after(place):
            node = gm.graph.call_module(target, (place,))
        set_facts(node, training_alone=all(facts_of(user).training_alone for user in users))
        for user in users:
            user.replace_input_with(place, node)


def _takes_another(node: fx.Node) -> bool:
    """Return whether a node takes a value in training mode that is not computed from the value that it takes in eval mode."""
    if not chooses_by_mode(node) or is_output(node):
        return False
    _, in_training, in_eval = node.args
    starts = [each for each in node.all_input_nodes if each is in_training]
    before = reached(starts, lambda each: each.all_input_nodes if facts_of(each).in_training else [])
    return all(each is not in_eval for each in before)


def _insert_weights(gm: QuantizedGraphModule, roles: Roles, requests: Sequence[Request]) -> Iterator[Edge]:
    values = gm.values_of([request.producer for request in requests])
    requests = [request for request in requests if values[request.producer].is_floating_point()]  # not of a spectrum
    specs = [decide.spec_of_weight(request, roles, values[request.producer].dim()) for request in requests]
    holder = add_holder(gm, WEIGHT_HOLDER) if requests else WEIGHT_HOLDER
    for request, spec in zip(requests, specs, strict=True):
        producer, consumer = request.producer, request.consumer
        target = f"{holder}.{free_name(gm.get_submodule(holder), consumer.name)}"
        along_outputs = kind_of(consumer).transposed and spec.axis in (1, 1 - values[producer].dim())
        groups = int(argument(consumer, 6, "groups", 1)) if along_outputs else 1
        quantizer = weight_quantizer(values[producer], spec, consumer.name, groups, target, inserted=True)
        gm.add_submodule(target, quantizer.train(gm.training))
        with gm.graph.inserting_before(consumer):
            node = gm.graph.call_module(target, (producer,))
        consumer.replace_input_with(producer, node)
        source = str(producer.target) if producer.op == "get_attr" else producer.name
        yield Edge(source, consumer.name, target, spec, request.why)


def add_holder(gm: QuantizedGraphModule, name: str) -> str:
    """Add an empty submodule, and return its name."""
    free = free_name(gm, name)
    gm.add_module(free, QuantizerHolder())
    return free


def free_name(module: nn.Module, name: str) -> str:
    """Return a name that no attribute of a module has: a node may have the name of a method of modules, such as `to`."""
    return next(free for free in chain([name], (f"{name}_{i}" for i in count(1))) if not hasattr(module, free))
