"""Capture a model by torch.export, which follows more Python than symbolic tracing; its graph is then traced like a model.

torch.export does not look into the modules that a trace keeps whole, nor into modules that read their training mode and
have no layers: the graph calls them, so that batch norms and dropouts follow their mode, and the model's names and
parameters stay. Other modules become torch's functions and methods. If they read their mode, both modes are captured,
and the graph selects by the mode where they differ.
"""

import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from copy import copy
from functools import partial, reduce
from io import StringIO
from operator import attrgetter
from typing import Any

import torch
from torch import FunctionSchema, Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.node import Argument
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from qtoolkit.errors import first_line, some
from qtoolkit.graph.block_calls import ROOT, BlockCall
from qtoolkit.graph.blocks import HELD
from qtoolkit.graph.capture.assignments import state_kept, undone_assignments
from qtoolkit.graph.capture.attributes import add_modes, name_in
from qtoolkit.graph.capture.called_layers import call_layers, called_as_layers
from qtoolkit.graph.capture.functions import causal_masks, patched
from qtoolkit.graph.capture.mode_reads import readers_of_modes
from qtoolkit.graph.capture.rewrites import both_modes, torch_modes
from qtoolkit.graph.capture.rewrites.both_modes import Traced
from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.capture.same_outputs import without_fast_path
from qtoolkit.graph.capture.tracer import ModelTracer
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING, UntraceableError
from qtoolkit.model_inputs import bind, split
from qtoolkit.model_state import RandomState, evaluating
from qtoolkit.nn import QAT_MODULES
from qtoolkit.op_kinds.facts import set_facts

GUARDS = "_guards_fn"  # the check of the inputs, which a graph of qtoolkit makes itself
ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")
LIFTS = ("lift_fresh", "lift_fresh_copy")  # of constants
ALIAS = "alias"  # of a whole tensor, as x[..., :n] is for all of its n columns
DROPOUTS: Mapping[str, Callable[..., Tensor]] = {
    "dropout": F.dropout, "alpha_dropout": F.alpha_dropout, "feature_alpha_dropout": F.feature_alpha_dropout,
    "feature_dropout": torch.feature_dropout,
}  # fmt: skip
# By the dimensions of the input; all of them are feature_dropout.
OF_CHANNELS = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}
BY_MODE = ("train", "training", "dropout_p")  # arguments of ops that another mode may change
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


def run(model: nn.Module, example_inputs: object, leaf_modules: Sequence[type[nn.Module]] = ()) -> fx.GraphModule:
    """Return a graph module with the parameters, buffers and layers of a model, under their names, in the model's mode.

    The graph has the branches of the example inputs. Batch sizes above 1 may change, if the model allows it. Modules of the
    types `leaf_modules` are called as torch's layers are. Raises UntraceableError: torch.export cannot capture the model, or it
    is in training mode, which computes other ops than eval mode; ValueError: there are no example inputs.
    """
    if example_inputs is None:
        raise ValueError('prepare: capture="export" runs the model on example_inputs; pass them.')
    tracer = ModelTracer(leaf_modules)
    names = {module: name for name, module in model.named_modules() if name}
    layers = {module: name for module, name in names.items() if tracer.is_leaf_module(module, name)}
    with state_kept(model):
        readers = readers_of_modes(model, example_inputs) - layers.keys()
    whole = {module: names[module] for module in readers if module in names and not _has_layers(module)}
    branching = readers - whole.keys()
    without_autocast: list[str] = []
    with patched(torch_modes.skipped_autocast(without_autocast, torch.autocast.__enter__)):
        captured, modes = _in_both_modes(model, example_inputs, layers | whole, branching)
    torch_modes.warn_of_autocast(without_autocast)
    return _module_of(model, captured, modes)


def _has_layers(module: nn.Module) -> bool:
    """Return whether a layer with weights to quantize is in a module."""
    return any(isinstance(part, tuple(QAT_MODULES)) for part in module.modules())


def _captured(model: nn.Module, example_inputs: object, called: Mapping[nn.Module, str]) -> fx.GraphModule:
    """Return the program of torch.export for a model in its mode, with calls of modules and functions of torch."""
    args, kwargs = split(example_inputs)
    try:
        shapes = tree_map(_shapes_of, dict(bind(model, example_inputs)))
        with (
            torch.no_grad(),
            without_fast_path(),
            patched(causal_masks()),
            undone_assignments(model, check=False),
            called_as_layers(called) as calls,
        ):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the user's forward may raise anything on fake tensors
        raise UntraceableError(
            f"prepare: torch.export cannot capture {type(model).__name__} ({type(error).__name__}: {first_line(error)}); "
            f"{WITHOUT_TRACING}."
        ) from error
    exported = graph_of(program)
    _check_ops(model, exported)
    call_layers(exported.graph, calls)
    for node in list(exported.graph.nodes):
        if calls_aten(node):
            _call_torch(node)
    return exported


def graph_of(program: ExportedProgram) -> fx.GraphModule:
    """Return the graph of a program as a module, without torch.export's check of the inputs."""
    module = program.module()
    for node in module.graph.find_nodes(op="call_module", target=GUARDS):
        module.graph.erase_node(node)
    return module


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
            f"prepare: torch.export writes {str(op)!r} for {type(model).__name__}, an op that has a graph, in which no layer "
            f"would be quantized; {WITHOUT_TRACING}."
        )


def _shapes_of(value: object) -> object:
    """Return which sizes of an input may change: the first size of a tensor."""
    return {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.dim() and len(value) > 1 else None


# ---- modes


def _in_both_modes(
    model: nn.Module, example_inputs: object, called: Mapping[nn.Module, str], branching: Collection[nn.Module]
) -> tuple[fx.GraphModule, dict[nn.Module, fx.Node]]:
    """Return a program that follows the modes of some submodules, and the node that reads the mode of each.

    If the programs of both modes cannot be merged, it is the program of eval mode; UntraceableError if one of
    these submodules is in training mode.
    """
    modes: dict[nn.Module, fx.Node] = {}
    trained = [name or type(model).__name__ for name, m in model.named_modules() if m in branching and m.training]
    before = RandomState.now()
    with evaluating(model):
        in_eval = _captured(model, example_inputs, called)
        if not branching:
            return in_eval, modes
        drawn = RandomState.now()
        before.restore()
        for module in (model, *branching):
            module.training = True
        try:
            # Where torch fails, it writes how far it came.
            with redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
                in_training = _captured(model, example_inputs, called)
            own, other = (_traced(program, model) for program in (in_training, in_eval))
            mode_of = partial(_mode_node, in_training.graph, model, modes)
            may_be_one = drawn == RandomState.now() and _agree(in_training, in_eval, model)
            if may_be_one and both_modes.merge(own, other, branching, mode_of):
                _take_constants(in_training, in_eval)
                return in_training, modes
        except UntraceableError:
            pass
    if trained:
        raise UntraceableError(
            f"prepare: the forward of {some(trained)} reads self.training, and torch.export captures other ops in training "
            f"mode than in eval mode, and no graph can hold both. Use layers that follow the mode, such as nn.Dropout and "
            f"nn.BatchNorm2d, or move the branch into a submodule without layers; prepare the model in eval mode, "
            f"whose branch the graph then has in both modes; or {WITHOUT_TRACING}.",
            trained[0],
        )
    return in_eval, {}


def _agree(one: fx.GraphModule, two: fx.GraphModule, model: nn.Module) -> bool:
    """Return whether two programs of a model return the same containers, and have equal constants under the same names."""
    read = ({str(node.target) for node in gm.graph.find_nodes(op="get_attr")} for gm in (one, two))
    own = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    constants = set.intersection(*read).difference(name for tensors in own for name, _ in tensors)
    pairs = [(attrgetter(name)(one), attrgetter(name)(two)) for name in constants]
    # `_out_spec` is where torch.export keeps the containers that a program returns.
    return one._out_spec == two._out_spec and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _take_constants(own: fx.GraphModule, other: fx.GraphModule) -> None:
    """Give a program the constants that its graph reads and the other program has."""
    missing: Any = object()
    for node in own.graph.find_nodes(op="get_attr"):
        path = str(node.target).split(".")
        if reduce(lambda owner, name: getattr(owner, name, missing), path, own) is missing:
            node.target = "_".join((*path, "of_eval_mode"))
            setattr(own, node.target, attrgetter(".".join(path))(other))


def _traced(program: fx.GraphModule, model: nn.Module) -> Traced:
    """Return the graph of a program for `both_modes`; each node gets the call of the submodule that made it."""
    calls = [BlockCall("")]
    known: dict[tuple[str, ...], int] = {(): ROOT}
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path: tuple[str, ...] = ()
        for name in (str(name).partition("@")[0] for name, _ in stack.values()):  # the second call of x is x@1
            parent, path = known[path], (*path, name) if name else path
            if path not in known:
                known[path] = len(calls)
                calls.append(BlockCall(name, parent))
        set_facts(node, call=known[path])
    return Traced(model, program.graph, {}, calls)


def _mode_node(graph: fx.Graph, model: nn.Module, modes: dict[nn.Module, fx.Node], module: nn.Module) -> fx.Node:
    """Return the node that reads the mode of a submodule, before all ops of a graph."""
    if module not in modes:
        path = next(name for name, each in model.named_modules() if each is module)
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            modes[module] = graph.create_node("call_module", f"{path}.{name_in(module)}".removeprefix("."), (), {})
    return modes[module]


# ---- ops


def _call_torch(node: fx.Node) -> None:
    """Let a node call what Python calls for an op of aten."""
    schema = node.target._schema  # type: ignore[union-attr]
    name = schema.name.rpartition("::")[2]
    node.args = args = _up_to_mode(schema, node.args)
    node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("layout", "pin_memory")}
    if name in ASSERTIONS:
        node.graph.erase_node(node)
    elif name == ALIAS or (name in DROPOUTS and not args[2]) or (name in LIFTS and not _is_changed(node)):
        node.replace_all_uses_with(args[0])
        node.graph.erase_node(node)
    elif name in DROPOUTS:
        dimensions = args[0].meta["val"].dim() if name == "feature_dropout" else 0
        node.target, node.args = OF_CHANNELS.get(dimensions, DROPOUTS[name]), args[:2]
        node.kwargs = {"training": True}
    elif name in PLACES:
        node.target, node.args = operator.getitem, (args[0], PLACES[name](*args[1:]))
    elif name in RESIZES and schema.overload_name == "vec":
        x, size, *aligned, factors = args
        node.target, node.args = F.interpolate, (x, size, factors, RESIZES[name], *aligned)
    else:
        function = _function_of(schema, name, len(args))
        node.op = "call_method" if function is None else "call_function"
        node.target = function or METHODS.get(name, name)


def _up_to_mode(schema: FunctionSchema, args: tuple[Argument, ...]) -> tuple[Any, ...]:
    """Return the arguments of an op with the one that depends on the mode, which torch leaves out where it has its default."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    count = max((names.index(name) + 1 for name in BY_MODE if name in names), default=0)
    return (*args, *(argument.default_value for argument in schema.arguments[len(args) : count]))


def _is_changed(node: fx.Node) -> bool:
    """Return whether an op changes what a node returns in place."""
    names = [str(getattr(user.target, "__name__", user.target)).partition(".")[0] for user in node.users]
    return any(name.endswith("_") for name in names)


def _function_of(schema: FunctionSchema, name: str, count: int) -> Callable[..., object] | None:
    """Return the function that takes the first arguments of an op of aten in its order; None where it is a method."""
    names = ["input" if argument.name == "self" else argument.name for argument in schema.arguments][:count]
    function = getattr(F, name, None)
    if inspect.isfunction(function) and [*inspect.signature(function).parameters][:count] == names:
        return function
    space, _, rest = name.partition("_")
    if space in SPACES:
        return getattr(getattr(torch, space), rest, None)
    # Private: where torch has functions of aten such as gelu, in aten's order of arguments.
    found: Callable[..., object] | None = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    return found


# ---- the result


def _module_of(model: nn.Module, captured: fx.GraphModule, modes: Mapping[nn.Module, fx.Node]) -> fx.GraphModule:
    """Return a graph module with the parameters, buffers and called layers of a model, and the constants of the program."""
    graph, read = captured.graph, set(modes.values())
    called = {model.get_submodule(str(node.target)) for node in graph.find_nodes(op="call_module") if node not in read}
    root = _without_forward(model, called, {})
    add_modes(root, graph, modes)
    for node in graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        module = root.get_submodule(owner)
        if not hasattr(module, name):
            module.register_buffer(name, attrgetter(str(node.target))(captured), persistent=False)
    result = fx.GraphModule(root, graph, type(model).__name__)
    # GraphModule takes over only what its graph uses: this one has all that the model has.
    vars(result).update({name: vars(root)[name] for name in HELD})
    result.graph.eliminate_dead_code(lambda node: node.is_impure() or changed_by(node, result) is not None)
    result.recompile()
    return result


def _without_forward(module: nn.Module, called: Collection[nn.Module], made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with the contents of another one, or the other one, if the graph calls it."""
    if module in called:
        return module
    if module not in made:
        made[module] = new = nn.Module()
        vars(new).update({name: copy(vars(module)[name]) for name in HELD})
        children = ((name, child) for name, child in module._modules.items() if child is not None)
        new._modules = {name: _without_forward(child, called, made) for name, child in children}
    return made[module]
