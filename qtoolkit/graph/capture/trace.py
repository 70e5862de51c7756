"""Trace a model to a GraphModule with the same parameter names; an error names the source line and the remedy."""

import inspect
import traceback
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.errors import unknown
from qtoolkit.graph.capture import functional_batch_norms as norms
from qtoolkit.graph.capture import in_place, subclasses
from qtoolkit.graph.capture.arguments import FIXED_TYPES, bind, fixed_arguments
from qtoolkit.graph.capture.mode import add_modes, marked
from qtoolkit.graph.capture.sizes import Sizes
from qtoolkit.graph.capture.tracer import (
    ModelTracer,
    check_assigned,
    check_hooks,
    describe_line,
    scripted_functions,
    user_line,
)
from qtoolkit.graph.graph_module import Method, QuantizedGraphModule
from qtoolkit.nn import QAT_MODULES
from qtoolkit.shared_modules import modules_by_name

# What wraps a model or replaces it, by the name of torch's class, and what to do instead.
WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": "prepare model.module first, then wrap the result",
    "DataParallel": "prepare model.module first, then wrap the result",
    "FullyShardedDataParallel": "prepare the model before it is sharded, then shard the result",
    "FSDPModule": "prepare the model before it is sharded, then shard the result",
    "OptimizedModule": "prepare model._orig_mod, which torch.compile was given, then compile the result",
    "ScriptModule": "prepare the Python model that TorchScript was made from",
}


class UntraceableError(RuntimeError):
    """A model whose Python cannot be turned into a graph.

    Attributes:
        skip: The submodule that prepare could keep whole, by its dotted name; "" where the model's own forward is at fault.
    """

    def __init__(self, message: str, skip: str = "") -> None:
        super().__init__(message)
        self.skip = skip


def run(
    model: nn.Module,
    leaf_modules: Sequence[type[nn.Module]] = (),
    skip: Sequence[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    preserve_attributes: Sequence[str] | None = None,
    example_inputs: Any = None,
) -> QuantizedGraphModule:
    """Trace a model.

    Arguments of forward that have a default, and that `example_inputs` does not give, are fixed at it. With example inputs,
    Python that decides on sizes (or on dtypes, devices, numbers of items) is traced as it goes for these sizes, and the
    graph checks at each run that it would go the same way.

    Args:
        model: The model; its submodules become those of the result.
        leaf_modules: Types of submodules to keep whole.
        skip: Dotted names of submodules to keep whole.
        concrete_args: Values of arguments of forward that are fixed at tracing.
        preserve_attributes: Dotted names of attributes and methods that the result keeps.
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor. Their values are not looked at.

    Raises:
        UntraceableError: The model's Python cannot be traced.
        ValueError: A name in `skip`, `concrete_args` or `preserve_attributes` is not known, or a tensor and a view of it are
            changed in place and read in a way that a quantizer between them would break.
        TypeError: An entry of `leaf_modules` is no type of module, or `example_inputs` do not fit forward.
    """
    check_model(model)
    check_leaf_modules(leaf_modules)
    kept = {name: _find_attribute(model, name) for name in preserve_attributes or ()}
    whole = _find_submodules(model, skip)
    fixed = fixed_arguments(model, concrete_args, example_inputs)
    sizes = None if example_inputs is None else Sizes(model, bind(model, example_inputs))
    tracer = ModelTracer(leaf_modules, whole, sizes, scripted_functions(model))
    random = torch.get_rng_state()
    try:
        check_hooks(model)
        with marked(model, tracer.decided_on_mode):
            graph = tracer.trace(model, fixed or None)
        check_assigned(model)
        if not torch.equal(random, torch.get_rng_state()):
            raise RuntimeError("random numbers are drawn that would be the same ones at every run of the graph.")
    except Exception as error:  # whatever the user's forward raises on proxies
        raise _explain(error, model, tracer.path, example_inputs is not None) from error
    _warn_of_modes(model, tracer.decisive)
    in_place.run(graph, model)
    for node in tracer.seen_through:
        node.meta.pop("is_wrapped", None)  # fx marks what a wrapped function returns, to be wrapped again
    _restore_names(graph, fixed)
    norms.run(model, graph)
    add_modes(model, graph)
    subclasses.run(model, graph, tuple(leaf_modules))
    traced = QuantizedGraphModule.of(model, graph, type(model).__name__)
    for name, value in kept.items():
        traced.keep(name, value)
    return traced


def _warn_of_modes(model: nn.Module, decisive: Collection[nn.Module]) -> None:
    names = [name or type(model).__name__ for name, module in model.named_modules() if module in decisive]
    if names:
        mode, other = ("training", "eval") if model.training else ("eval", "training")
        warnings.warn(
            f"prepare: {', '.join(names)} decides on self.training in Python: the graph keeps what that gave in {mode} mode, "
            f"in {other} mode too. Prepare the model in the mode that it will be exported in, or name the submodule in `skip`.",
            stacklevel=4,  # who called prepare
        )


# ---- what is refused


def check_model(model: nn.Module, what: str = "prepare") -> None:
    """Raise UntraceableError for a model that is wrapped, compiled or not initialized, or, to trace it, patched.

    Args:
        model: The model.
        what: Who takes the model, for errors. All but "prepare" leave its forward alone.
    """
    verb = what if what == "prepare" else f"call {what} on"
    for name, module in model.named_modules():
        bases = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")]
        found = next((base for base in bases if base in WRAPPERS), None)
        if found is not None and not (name and found == "ScriptModule"):  # a scripted submodule is kept whole
            which = f"submodule {name!r}" if name else "the model"
            remedy = WRAPPERS[found].replace("prepare", verb)
            raise UntraceableError(f"{what}: {which} is wrapped in {found}; {remedy}.")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UntraceableError(f"{what}: parameter {lazy[0]!r} has no shape yet; run the model once on a batch first.")
    if what == "prepare" and "forward" in vars(model):
        raise UntraceableError(
            f"prepare: {type(model).__name__}.forward was replaced on this one model; make it a method of the class."
        )


def check_leaf_modules(leaf_modules: Sequence[type[nn.Module]]) -> None:
    """Raise TypeError unless all entries are types of modules."""
    for kind in leaf_modules:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(
                f"prepare: leaf_modules must hold types of torch.nn.Module, got {kind!r}; name one submodule with skip."
            )


def _find_submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    if isinstance(names, str):
        raise TypeError(f"prepare: skip must be a sequence of names, got the string {names!r}; write skip=[{names!r}].")
    known = modules_by_name(model)
    for name in names:
        if not name:
            raise ValueError('prepare: skip: "" is the model itself, of which nothing would be left to trace.')
        if name not in known:
            raise ValueError("prepare: skip: " + unknown("submodule", name, filter(None, known)))
    return [known[name] for name in names]


def _find_attribute(model: nn.Module, name: str) -> Any:
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = model.get_submodule(owner_name)
    except AttributeError:
        modules = [n for n, _ in model.named_modules() if n]
        raise ValueError("prepare: preserve_attributes: " + unknown("submodule", owner_name, modules)) from None
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


# ---- names and errors


def _restore_names(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Give the placeholders of fixed arguments the argument's name again, so that they can be passed by keyword."""
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target).removesuffix("_1")
        if name in fixed and isinstance(fixed[name], FIXED_TYPES):  # a container's parts have names of their own
            node.target = name


def _explain(
    error: Exception, model: nn.Module, path: Sequence[tuple[str, nn.Module]], measured: bool
) -> UntraceableError:
    name, module = path[-1] if path else ("", model)
    kind = type(module).__name__
    frame = user_line(traceback.extract_tb(error.__traceback__))
    where = "its forward" if frame is None else describe_line(frame)
    at = f"submodule {name!r} ({kind})" if name else f"{kind}.forward"
    remedies = ["rewrite that line without Python control flow on tensors"]
    if frame is not None and frame.name != "forward":
        remedies.append(
            f"if {frame.name!r} is a function of its own, record it as one op with torch.fx.wrap({frame.name!r})"
        )
    remedies += _remedies(model, name, kind)
    if not measured:
        remedies.append("pass example_inputs, so that decisions on sizes are taken by them")
    return UntraceableError(
        f"prepare: cannot trace {type(model).__name__}: {type(error).__name__} in {at}: {error} At {where}. "
        f"What helps: {'; '.join(remedies)}.",
        name,
    )


def _remedies(model: nn.Module, name: str, kind: str) -> Iterable[str]:
    if name:
        yield f"keep that submodule whole with skip=[{name!r}] or leaf_modules=[{kind}]"
    else:
        yield "move that code into a submodule and keep it whole with skip or leaf_modules"
        children = [f"model.{child} = qtoolkit.prepare(model.{child})" for child in _children_with_layers(model)]
        if children:
            yield f"prepare submodules on their own: {', '.join(children)}"
    parameters = inspect.signature(model.forward).parameters
    if len(parameters) > 1:
        yield f"fix an argument ({', '.join(parameters)}) with concrete_args"


def _children_with_layers(model: nn.Module) -> list[str]:
    return [name for name, child in model.named_children() if any(type(m) in QAT_MODULES for m in child.modules())]
