"""Trace a model to a GraphModule with the same parameter names; an error names the source line and the remedy."""

import inspect
import linecache
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.names import unknown
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm

TORCH_FOLDER = str(Path(torch.__file__).parent)
HERE = __file__


class UntraceableError(RuntimeError):
    """A model whose Python cannot be turned into a graph."""


class _Tracer(fx.Tracer):
    """fx.Tracer with more leaves, that knows which submodule it is in."""

    # The defaults are for torch.fx, which makes a tracer of this class when it unpickles a GraphModule.
    def __init__(self, leaf_modules: Sequence[type[nn.Module]] = (), skip: Sequence[str] = ()) -> None:
        super().__init__()
        self.leaf_modules, self.skip = tuple(leaf_modules), set(skip)
        self.path: list[tuple[str, nn.Module]] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            isinstance(m, (QuantModule, *self.leaf_modules))
            or is_batch_norm(m)  # FrozenBatchNorm is of no torch package
            or module_qualified_name in self.skip
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.path.append((self.path_of_module(m), m))
        result = super().call_module(m, forward, args, kwargs)
        self.path.pop()  # left as it is by an error: it tells where the error was
        return result


def run(
    model: nn.Module,
    leaf_modules: Sequence[type[nn.Module]] = (),
    skip: Sequence[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    preserve_attributes: Sequence[str] | None = None,
) -> QuantizedGraphModule:
    """Trace a model.

    Args:
        model: The model; its submodules become those of the result.
        leaf_modules: Types of submodules to keep whole.
        skip: Dotted names of submodules to keep whole.
        concrete_args: Values of arguments of forward that are fixed at tracing.
        preserve_attributes: Dotted names of attributes and methods that the result keeps.

    Raises:
        UntraceableError: The model's Python cannot be traced.
        ValueError: A name in `skip` or `preserve_attributes` is not known.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UntraceableError(
            f"prepare: the model is wrapped in {type(model).__name__}; prepare model.module first, then wrap the result."
        )
    names = [name for name, _ in model.named_modules() if name]
    for name in skip:
        if name not in names:
            raise ValueError("prepare: skip: " + unknown("submodule", name, names))
    tracer = _Tracer(leaf_modules, skip)
    try:
        graph = tracer.trace(model, dict(concrete_args) if concrete_args else None)
    except Exception as error:  # whatever the user's forward raises on proxies
        raise UntraceableError(_explain(error, model, tracer.path)) from error
    traced = QuantizedGraphModule.of(fx.GraphModule(tracer.root, graph, type(model).__name__))
    for name in preserve_attributes or ():
        _preserve(model, traced, name)
    return traced


def _explain(error: Exception, model: nn.Module, path: list[tuple[str, nn.Module]]) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(TORCH_FOLDER)]
    frames = [f for f in frames if f.filename != HERE]
    where = "its forward"
    if frames:
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        where = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}: `{line}`"
    name, module = path[-1] if path else ("", model)
    kind = type(module).__name__
    remedy = (
        f"keep that submodule whole with skip=[{name!r}] or leaf_modules=[{kind}]"
        if name
        else "move that code into a submodule and keep it whole with skip or leaf_modules"
    )
    parameters = inspect.signature(model.forward).parameters
    fix = "" if len(parameters) < 2 else f", or fix an argument ({', '.join(parameters)}) with concrete_args"
    at = f"submodule {name!r} ({kind})" if name else f"{kind}.forward"
    return (
        f"prepare: cannot trace {type(model).__name__}: {type(error).__name__} in {at}: {error} At {where}. "
        f"Rewrite that line without Python control flow on tensors, {remedy}{fix}."
    )


def _preserve(model: nn.Module, traced: QuantizedGraphModule, name: str) -> None:
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = model.get_submodule(owner_name)
        value = getattr(owner, attribute)
    except AttributeError:
        raise ValueError(f"prepare: preserve_attributes: the model has no attribute {name!r}.") from None
    target = traced.get_submodule(owner_name)
    if isinstance(value, MethodType) and value.__self__ is owner:
        value = MethodType(value.__func__, target)
    traced.keep(name, value)
