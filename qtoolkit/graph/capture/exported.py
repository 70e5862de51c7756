"""Capture a model by torch.export, which follows Python that symbolic tracing does not; its graph is then traced as any model.

torch.export writes ops of aten and notes which module called them. The calls of torch's own layers become calls of these
modules again, so that batch norms and dropouts follow their mode, and names and parameters are those of the model. The other
ops become torch's functions and methods.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from qtoolkit.errors import first_line
from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING, UntraceableError
from qtoolkit.model_inputs import bind, split
from qtoolkit.model_state import evaluating

GUARDS = "_guards_fn"  # the check of the inputs, which a graph of qtoolkit makes itself
ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")
LIFTS = ("lift_fresh", "lift_fresh_copy")  # of constants
ALIAS = "alias"  # of a whole tensor, as x[..., :n] is for all of its n columns
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
SPACES = ("linalg", "fft", "special")  # of torch, whose functions aten names with a prefix
# Ops of aten that are methods with another name in Python.
METHODS = {"sym_size": "size", "sym_stride": "stride", "sym_numel": "numel", **dict.fromkeys(LIFTS, "clone")}
# Ops of aten that are x[...] in Python, and the index that their other arguments make.
PLACES: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "slice": lambda dim=0, start=None, end=None, step=1: (*[slice(None)] * dim, slice(start, end, step)),
    "index": lambda indices: tuple(slice(None) if index is None else index for index in indices),
}
RESIZES = {
    "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest",
    "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear",
    "upsample_bicubic2d": "bicubic",
}  # fmt: skip


def run(model: nn.Module, example_inputs: Any, leaf_modules: Sequence[type[nn.Module]] = ()) -> fx.GraphModule:
    """Return a graph module with the parameters, buffers and layers of a model, under their names, in the model's mode.

    The graph has the branches of eval mode, and of the example inputs. Batch sizes above 1 may change, if the model allows it.
    Modules of the types `leaf_modules` are called as torch's layers are. Raises UntraceableError: torch.export cannot capture
    the model; ValueError: there are no example inputs.
    """
    if example_inputs is None:
        raise ValueError('prepare: capture="export" runs the model on example_inputs; pass them.')
    args, kwargs = split(example_inputs)
    try:
        shapes = tree_map(_shapes_of, dict(bind(model, example_inputs)))
        with evaluating(model), torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the user's forward may raise anything on fake tensors
        raise UntraceableError(
            f"prepare: torch.export cannot capture {type(model).__name__} ({type(error).__name__}: {first_line(error)}); "
            f"{WITHOUT_TRACING}."
        ) from error
    exported: Any = program.module()
    graph = exported.graph
    _check_ops(model, exported)
    for node in graph.find_nodes(op="call_module", target=GUARDS):
        graph.erase_node(node)
    _call_layers(model, graph, tuple(leaf_modules))
    for node in list(graph.nodes):
        if calls_aten(node):
            _call_torch(node)
    return _module_of(model, exported, graph)


def calls_aten(node: fx.Node) -> bool:
    """Return whether a node calls an op of aten, as graphs of torch.export do; ops of other libraries stay as they are."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _check_ops(model: nn.Module, exported: fx.GraphModule) -> None:
    """Raise UntraceableError for ops that take a graph, as torch.cond and flex_attention do."""
    read = exported.graph.find_nodes(op="get_attr")
    taken = [node for node in read if isinstance(attrgetter(str(node.target))(exported), nn.Module)]
    if taken:
        op = next(iter(taken[0].users)).target
        raise UntraceableError(
            f"prepare: torch.export writes {str(op)!r} for {type(model).__name__}, an op that takes a graph, in which no layer "
            f"would be quantized; {WITHOUT_TRACING}."
        )


def _shapes_of(value: Any) -> Any:
    """Return which sizes of an input may change: of a tensor that of the first dimension."""
    return {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.dim() and len(value) > 1 else None


# ---- layers


def _call_layers(model: nn.Module, graph: fx.Graph, leaf_modules: tuple[type[nn.Module], ...]) -> None:
    """Replace the ops of a layer of torch by a call of the layer, where it takes one tensor and returns one."""
    layers = dict(model.named_modules(remove_duplicate=False))
    calls = groupby(list(graph.nodes), key=lambda node: next(reversed(node.meta.get("nn_module_stack") or {"": None})))
    for _, group in calls:
        nodes = list(group)
        stack = nodes[0].meta.get("nn_module_stack")
        path = [*stack.values()][-1][0] if stack and nodes[0].op == "call_function" else ""
        layer = layers.get(path)
        if path and layer is not None and (isinstance(layer, leaf_modules) or _is_layer(layer, path)):
            _call_layer(graph, nodes, path)


def _is_layer(module: nn.Module, path: str) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return fx.Tracer().is_leaf_module(module, path) and len(required) == 1 and not isinstance(module, nn.RNNBase)


def _call_layer(graph: fx.Graph, nodes: list[fx.Node], path: str) -> None:
    inside, last = set(nodes), nodes[-1]
    taken = {source for node in nodes for source in node.all_input_nodes} - inside
    inputs = [source for source in taken if source.op != "get_attr"]
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    own = all(str(s.target).rpartition(".")[0] == path for s in taken if s.op == "get_attr")
    if len(inputs) != 1 or given != [last] or not own:
        return
    with graph.inserting_before(nodes[0]):
        call = graph.create_node("call_module", path, (inputs[0],))
    last.replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)


# ---- ops


def _call_torch(node: fx.Node) -> None:
    """Let a node call what Python calls for an op of aten."""
    schema, args = node.target._schema, tuple[Any, ...](node.args)  # type: ignore[union-attr]
    name = schema.name.rpartition("::")[2]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("layout", "pin_memory")}
    if name in ASSERTIONS:
        node.graph.erase_node(node)
    elif (
        name == ALIAS
        or (name in DROPOUTS and not args[2])
        or (name in LIFTS and not any(map(_changes_its_input, node.users)))
    ):
        node.replace_all_uses_with(args[0])
        node.graph.erase_node(node)
    elif name in PLACES:
        node.target, node.args = operator.getitem, (args[0], PLACES[name](*args[1:]))
    elif name in RESIZES and schema.overload_name == "vec":
        x, size, *aligned, factors = args
        node.target, node.args = F.interpolate, (x, size, factors, RESIZES[name], *aligned)
    else:
        function = _function_of(schema, name, len(args))
        node.op = "call_method" if function is None else "call_function"
        node.target = function or METHODS.get(name, name)


def _changes_its_input(node: fx.Node) -> bool:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0].endswith("_")


def _function_of(schema: Any, name: str, count: int) -> Callable[..., Any] | None:
    """Return the function that takes the first arguments of an op of aten in its order; None where it is a method."""
    names = ["input" if argument.name == "self" else argument.name for argument in schema.arguments][:count]
    function = getattr(F, name, None)
    if inspect.isfunction(function) and [*inspect.signature(function).parameters][:count] == names:
        return function
    space, _, rest = name.partition("_")
    if space in SPACES:
        return getattr(getattr(torch, space), rest, None)
    found: Callable[..., Any] | None = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    return found


# ---- the result


def _module_of(model: nn.Module, exported: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module with the parameters, buffers and called layers of a model, and the constants of the program."""
    called = {model.get_submodule(str(node.target)) for node in graph.find_nodes(op="call_module")}
    root = _without_forward(model, called, {})
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." not in name and not hasattr(root, name):
            root.register_buffer(name, getattr(exported, name), persistent=False)
    result = fx.GraphModule(root, graph, type(model).__name__)
    held = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "training")
    vars(result).update({name: vars(root)[name] for name in held})
    result.graph.eliminate_dead_code(lambda node: node.is_impure() or changed_by(node, result) is not None)
    result.recompile()
    return result


def _without_forward(module: nn.Module, called: Collection[nn.Module], made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module that holds what another one does, or the other one, if the graph calls it."""
    if module in called:
        return module
    if module not in made:
        made[module] = new = nn.Module().train(module.training)
        new._parameters, new._buffers = dict(module._parameters), dict(module._buffers)
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        children = ((name, child) for name, child in module._modules.items() if child is not None)
        new._modules = {name: _without_forward(child, called, made) for name, child in children}
    return made[module]
