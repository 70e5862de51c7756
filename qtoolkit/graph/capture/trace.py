"""Trace a model to a GraphModule with the same parameter names. An error names the source line and the remedies."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch import fx, nn

from qtoolkit.errors import check_sequence, shown, some, unknown, warn
from qtoolkit.foreign import ASKED_FOR, integration_of
from qtoolkit.graph.block_calls import ROOT, BlockCall
from qtoolkit.graph.blocks import TracedBlock, find_module
from qtoolkit.graph.capture.assignments import undone_assignments
from qtoolkit.graph.capture.attributes import add_modes, check_hooks, has_own_train, kept_in_eval_mode, traced_modes
from qtoolkit.graph.capture.exported import calls_aten
from qtoolkit.graph.capture.functions import scripted_functions
from qtoolkit.graph.capture.rewrites import both_modes, functional_layers, in_place, subclasses, torch_modes
from qtoolkit.graph.capture.rewrites import functional_batch_norms as norms
from qtoolkit.graph.capture.rewrites.blocks import with_blocks
from qtoolkit.graph.capture.rewrites.both_modes import Traced, note_training_mode
from qtoolkit.graph.capture.same_outputs import Expected
from qtoolkit.graph.capture.shapes import ShapePropagation
from qtoolkit.graph.capture.signature import FIXED_TYPES, Arguments
from qtoolkit.graph.capture.tracer import ModelTracer
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING, UntraceableError, untraceable
from qtoolkit.graph.graph_module import Method, QuantizedGraphModule, names_of_own, type_for
from qtoolkit.graph.output_types import OutputTypes
from qtoolkit.model_state import RandomState, attribute_kept
from qtoolkit.op_kinds.facts import set_facts
from qtoolkit.op_kinds.recorded import check_default, check_given, check_none
from qtoolkit.shared_modules import modules_by_name
from qtoolkit.wrapped import WRAPPERS, wrapper_of


class Captured(NamedTuple):
    """A model as a graph, and the facts about its forward that tracing found."""

    gm: QuantizedGraphModule
    calls: tuple[BlockCall, ...]  # the calls of its blocks
    branches: tuple[str, ...]  # the submodules of which the graph has the branch of one mode in both modes
    output_types: OutputTypes  # the classes of mappings that it returns


def run(
    model: nn.Module,
    leaf_modules: Sequence[type[nn.Module]] = (),
    untraced: Sequence[str] = (),
    concrete_args: Mapping[str, object] | None = None,
    preserve_attributes: Sequence[str] | None = None,
    example_inputs: object = None,
    original: nn.Module | None = None,
) -> Captured:
    """Trace a model.

    Arguments of forward that have a default and are not in `example_inputs` are fixed at the default; `*args` and `**kwargs`
    for which the example inputs give nothing are empty. With example inputs, Python may branch on sizes (or dtypes, devices,
    numbers of items): the graph has the branch that these sizes select, and checks at each run that the sizes select the same
    one. The values of example inputs do not change the graph, which is compared with the model on them.

    `qtoolkit.prepare` has the same arguments; `original` is the model of which `model` is a graph already, by torch.export.

    Raises:
        UntraceableError: The model's Python cannot be traced, or its graph computes something else.
        ValueError: A name in `untraced`, `concrete_args` or `preserve_attributes` is unknown; or a tensor is changed in place
            and a view of it is read later, which a quantizer between them would break.
        TypeError: An entry of `leaf_modules` is not a module type, or `example_inputs` do not match forward.
    """
    check_model(model)
    check_leaf_modules(leaf_modules)
    original = model if original is None else original
    kept = _attributes_to_keep(original, preserve_attributes or ())
    in_eval_mode = kept_in_eval_mode(original) if original.training else []
    leaf_submodules = _find_submodules(model, untraced)
    arguments = Arguments.of(model, concrete_args, example_inputs)

    def trace_once() -> _Trace:
        shapes = None if arguments.given is None else ShapePropagation(model, arguments.given)
        tracer = ModelTracer(leaf_modules, leaf_submodules, shapes, scripted_functions(model), arguments.call)
        graph = _graph(model, tracer, arguments.fixed)
        return _Trace(tracer, Traced(model, graph, tracer.modes, tracer.blocks.calls))

    (tracer, traced), batch_norms, branches = _in_both_modes(model, trace_once)
    note_training_mode(traced.graph)
    expected = None
    if example_inputs is not None:  # with branches the graph computes what the model's own mode does, in both modes
        called = [find_module(original, str(node.target)) for node in traced.graph.find_nodes(op="call_module")]
        expected = Expected(original, example_inputs, concrete_args or {}, bool(branches), list(filter(None, called)))
    if model.training:
        _warn_of_modes(branches)
    if tracer.checkpointed:
        _warn_of_checkpoint(model)
    torch_modes.warn_of_autocast(tracer.torch_modes.without_autocast)
    _warn_of_finite_checks(tracer.finite_checks.values())
    for node in tracer.inlined:
        node.meta.pop("is_wrapped", None)  # torch.fx would wrap the result of a wrapped function again
    _restore_arguments(traced.graph, arguments.fixed)
    _check_arguments(traced.graph, arguments)
    add_modes(traced.model, traced.graph, traced.modes)
    norms.use_torch_types(traced, batch_norms)
    subclasses.run(traced, tuple(leaf_modules))
    functional_layers.run(traced)
    gm = type_for(type(original)).of(with_blocks(traced), traced.graph, type(original).__name__)
    for name, value in kept.items():
        gm.keep(name, value)
    if expected is not None:
        if both_modes.of_one_mode(gm.graph, training=False):  # whose ops torch.fx's own code runs in training mode too
            gm.divide(tuple(traced.calls))
        expected.check(gm)
        gm.calls = ()
    _warn_of_own_train(gm, in_eval_mode)
    return Captured(gm, tuple(traced.calls), branches, tracer.output_types)


class _Trace(NamedTuple):
    """A tracer and its results."""

    tracer: ModelTracer
    traced: Traced


def _graph(model: nn.Module, tracer: ModelTracer, fixed: dict[str, object]) -> fx.Graph:
    """Trace a model in its mode; errors as for `run`."""
    random = RandomState.now()
    try:
        check_hooks(model)
        with undone_assignments(model), traced_modes(model, tracer.branch_on_mode):
            graph = tracer.trace(model, fixed or None)
        if random != RandomState.now():
            raise RuntimeError(
                "the forward draws random numbers, by torch, random or numpy, that every run of the graph would repeat."
            )
    except Exception as error:  # the user's forward may raise anything on proxies
        raise untraceable(error, model, tracer.path, tracer.shapes is not None) from error
    tracer.erase_finite_checks()
    in_place.run(graph, model)
    values = {} if tracer.shapes is None else tracer.shapes.values
    torch_modes.run(graph, model, values, tracer.without_grad)
    return graph


def _in_both_modes(model: nn.Module, trace_once: Callable[[], _Trace]) -> tuple[_Trace, list[str], tuple[str, ...]]:
    """Trace a model so that its graph follows the mode, where it can.

    A forward may set values that its next call reads: models of transformers note in their config which loss they compute. So
    where the other mode has other ops, this mode is traced once more. Returns the trace; what `norms.run` returns; and the
    submodules of which the graph has the branch of this mode in both modes.
    """
    own = trace_once()
    branching = dict.fromkeys(own.tracer.branching)
    batch_norms = norms.run(own.traced)
    other = _in_other_mode(branching, trace_once) if branching else None
    if other is not None and not both_modes.have_the_same_ops(own.traced, other.traced):
        own = trace_once()
        batch_norms = norms.run(own.traced)
    if other is not None and both_modes.merge(own.traced, other.traced, branching, own.tracer.mode_before_all):
        return own, batch_norms, ()
    names = (name or type(model).__name__ for name, module in model.named_modules() if module in branching)
    return own, batch_norms, tuple(names)


def _in_other_mode(branching: dict[nn.Module, None], trace_once: Callable[[], _Trace]) -> _Trace | None:
    """Trace a model with some submodules in the other mode; None where their Python cannot be traced.

    Their submodules keep their modes, except those that branch too, which are added: the other mode may be the first to call
    them.
    """
    random = RandomState.now()
    try:
        while True:
            with attribute_kept(branching, "training"), warnings.catch_warnings(action="ignore"):
                for module in branching:
                    module.training = not module.training
                other = trace_once()
                if branching.keys() >= other.tracer.branching.keys():
                    for node in other.tracer.inlined:
                        node.meta.pop("is_wrapped", None)
                    norms.run(other.traced)  # which asks the modules for their modes
                    return other
            branching.update(other.tracer.branching)
    except (UntraceableError, ValueError):
        return None
    finally:
        random.restore()


def _warn_of_checkpoint(model: nn.Module) -> None:
    warn(
        f"prepare: {type(model).__name__} uses torch.utils.checkpoint; the graph computes the same values and gradients, but "
        f"stores the activations instead of recomputing them. To recompute them, checkpoint blocks of the prepared model, as "
        f"apply_activation_checkpointing does, or make the submodules that use it leaf modules with `untraced`.",
    )


def _warn_of_finite_checks(names: Iterable[str]) -> None:
    if names := tuple(dict.fromkeys(names)):
        warn(
            f"prepare: Python tests whether values are finite in {some(names)}; the graph has the branch of finite values, and "
            f"passes NaN and infinities on. qtoolkit.stop_on_nonfinite(prepared) raises an error at the first one; to keep "
            f"such a test, name the submodule in `untraced`.",
        )


def _warn_of_modes(branches: Sequence[str]) -> None:
    if branches:
        warn(
            f"prepare: Python branches on self.training in {', '.join(branches)}; the graph computes the branch of training "
            f"mode in eval mode too. Prepare the model in the mode of its export, or name the submodule in `untraced`.",
        )


def _warn_of_own_train(gm: QuantizedGraphModule, names: Sequence[str]) -> None:
    """Warn of modules that `train()` of a class of the model keeps in eval mode, unless that class is in the graph."""
    others = [name for name in names if not any(has_own_train(part) for part in _path_to(gm, name))]
    if others:
        warn(
            f"prepare: train() of this model's own classes keeps {some(list(map(repr, others)))} in eval mode, but train() of "
            f"the prepared model is torch's, and puts them in training mode. After each prepared.train(), call "
            f"prepared.get_submodule(name).eval() for them; or once qtoolkit.freeze_batch_norm(prepared.get_submodule(name)) "
            f"for a batch norm after a layer, or a block of them.",
        )


def _path_to(gm: QuantizedGraphModule, name: str) -> Iterator[nn.Module]:
    """Yield the modules of a graph module, itself left out, from one of its children to the module of a dotted name."""
    held: nn.Module = gm
    for atom in name.split("."):
        child = held._modules.get(atom)
        if child is None:
            return
        held = child
        if not isinstance(held, TracedBlock):  # whose methods are torch's
            yield held


# ---- checks


def check_model(model: nn.Module, what: str = "prepare") -> None:
    """Raise UntraceableError for a model that is wrapped, compiled or not initialized, or whose forward was replaced.

    Errors begin with `what`, the calling function: only "prepare" traces forward and checks that it was not replaced.
    """
    for name, module in model.named_modules():
        if not (name and wrapper_of(module) == "ScriptModule"):  # a scripted submodule is a leaf module
            check_not_wrapped(module, what, name)
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UntraceableError(f"{what}: parameter {lazy[0]!r} has no shape yet; run the model once on a batch first.")
    if what == "prepare" and isinstance(model, fx.GraphModule) and any(map(calls_aten, model.graph.nodes)):
        raise UntraceableError(
            'prepare: the model is a graph of torch.export; prepare the model itself, with capture="export".'
        )
    if what == "prepare" and "forward" in vars(model):
        raise UntraceableError(
            f"prepare: forward was replaced on this instance of {type(model).__name__}; define forward in the class, or "
            f"{WITHOUT_TRACING}."
        )


def check_not_wrapped(model: nn.Module, what: str, name: str = "") -> None:
    """Raise UntraceableError, which begins with `what`, for a module that torch put around a model, or around a submodule."""
    found = wrapper_of(model)
    remedy, holds = (None, None) if found is None else (WRAPPERS[found].remedy, WRAPPERS[found].holds)
    if remedy is None:
        return
    verb = what if what == "prepare" else f"call {what} on"
    remedy = remedy.replace("prepare", verb)
    if name and holds is not None:
        inner = f"model.get_submodule({name!r}).{holds}"
        remedy = f"call model.set_submodule({name!r}, {inner}) first, and wrap what {what} returns"
    raise UntraceableError(f"{what}: {f'submodule {name!r}' if name else 'the model'} is wrapped in {found}; {remedy}.")


def check_leaf_modules(leaf_modules: Sequence[type[nn.Module]]) -> None:
    """Raise TypeError unless all entries are module types."""
    check_sequence(leaf_modules, "prepare", "leaf_modules", "module types")
    for kind in leaf_modules:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(
                f"prepare: leaf_modules must contain subclasses of torch.nn.Module, got {shown(kind)}; name a submodule in "
                f"untraced."
            )


def _find_submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    check_sequence(names, "prepare", "untraced")
    known = modules_by_name(model)
    for name in names:
        if not name:
            raise ValueError('prepare: untraced must name submodules, got "", which is the model itself.')
        if name not in known:
            raise _unknown_submodule(model, "untraced", name)
    return [known[name] for name in names]


def _unknown_submodule(model: nn.Module, argument: str, name: str) -> ValueError:
    return ValueError(f"prepare: {argument}: " + unknown("submodule", name, filter(None, modules_by_name(model))))


def _attributes_to_keep(model: nn.Module, names: Sequence[str]) -> dict[str, object]:
    check_sequence(names, "prepare", "preserve_attributes")
    integration = integration_of(type(model))
    own = {} if integration is None else integration.attributes_of(model)
    asked = ((name, getattr(model, name, None)) for name in ASKED_FOR)
    own |= {
        name: Method(value.__func__, needed=False) if isinstance(value, MethodType) else value
        for name, value in asked
        if isinstance(value, MethodType | dict)
    }
    return {**own, **{name: _find_attribute(model, name) for name in names}}


def _find_attribute(model: nn.Module, name: str) -> object:
    if not isinstance(name, str):
        raise TypeError(f"prepare: preserve_attributes must contain dotted names, got {name!r}.")
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = model.get_submodule(owner_name)
    except AttributeError:
        raise _unknown_submodule(model, "preserve_attributes", owner_name) from None
    if not owner_name and attribute in names_of_own():
        raise ValueError(
            f"prepare: preserve_attributes must not name {name!r}, since prepared models have an attribute of that name; "
            f"rename it in the model, for example to '{name}_'."
        )
    try:
        value = getattr(owner, attribute)
        return Method(value.__func__) if isinstance(value, MethodType) and value.__self__ is owner else value
    except AttributeError:
        where = f"submodule {owner_name!r}" if owner_name else "the model"
        names = [n for n in vars(owner) if not n.startswith("_")]
        raise ValueError(
            f"prepare: preserve_attributes: {where} has no attribute {attribute!r}: "
            + unknown("attribute", name, names)
        ) from None


def _restore_arguments(graph: fx.Graph, fixed: Mapping[str, object]) -> None:
    """Give the placeholders of fixed arguments the arguments' names, so that they can be passed, and the values as defaults."""
    behind_default = False  # Python allows no argument without a default there; a call passes it
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target).removesuffix("_1")
        if name in fixed and isinstance(fixed[name], FIXED_TYPES):  # the parts of a container have other names
            node.target = name
            node.args = (fixed[name],)
        elif behind_default and not node.args:
            node.args = (None,)
        behind_default = behind_default or bool(node.args)


def _check_arguments(graph: fx.Graph, arguments: Arguments) -> None:
    """Let a graph refuse another value than the default of an argument that is left out, and None for one that is given.

    Forward would take another branch.
    """
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        name = str(node.target)
        check: tuple[Callable[..., None], tuple[Any, ...]]
        if arguments.left_out.get(name) is not None:
            check = check_default, (node, arguments.left_out[name], name)
        elif name in arguments.left_out:
            check = check_none, (node, f"argument {name!r} has been fixed at its default")
        elif arguments.given is not None and node.users and node.args == (None,) and name not in arguments.fixed:
            check = check_given, (node, name)
        else:
            continue
        with graph.inserting_after(placeholders[-1]):
            set_facts(graph.call_function(*check), call=ROOT)
