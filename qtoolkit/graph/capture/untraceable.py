"""The error for a model that cannot be traced: where its Python stops the trace, and the remedies."""

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import fx, nn

from qtoolkit.graph.capture.assignments import StateError
from qtoolkit.graph.capture.signature import VARIADIC
from qtoolkit.nn import QAT_MODULES

OWN_FOLDERS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# The argument with which language models return what they have computed for the next token.
CACHE = "use_cache"
# The remedy that helps with every model: its layers are replaced, and its Python stays as it is.
WITHOUT_TRACING = "quantize the model without tracing it, by qtoolkit.quant_modules.replace(model, backend=...)"


class UntraceableError(RuntimeError):
    """A model whose Python cannot be turned into a graph.

    Attributes:
        untraced: Dotted name of the submodule that can be a leaf module instead; "" if the model's own forward is at fault.

    Example:
        >>> class Branch(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> try:
        ...     qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), Branch()), backend="tensorrt")
        ... except qt.UntraceableError as error:
        ...     print(error.untraced)
        1
    """

    def __init__(self, message: str, untraced: str = "") -> None:
        super().__init__(message)
        self.untraced = untraced


def user_line(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost of some frames that is outside torch, the tracer and Python's standard library."""
    foreign = [f for f in frames if not (f.filename.startswith(OWN_FOLDERS) or _is_standard(f.filename))]
    return foreign[-1] if foreign else None


def _is_standard(filename: str) -> bool:
    return filename.startswith(STANDARD_LIBRARY) and "-packages" not in filename  # those are inside the folder too


def describe_line(frame: traceback.FrameSummary | None) -> str:
    """Return file, line, function and source of a frame."""
    if frame is None:
        return "its forward"
    source = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: `{source}`"


def untraceable(
    error: Exception, model: nn.Module, path: Sequence[tuple[str, nn.Module]] = (), has_example_inputs: bool = True
) -> UntraceableError:
    """Return the error that reports an exception at tracing.

    `path` has the names and modules of the submodules that were being traced, outermost first; of a StateError it is not read.
    """
    path = error.path if isinstance(error, StateError) else path
    name, module = path[-1] if path else ("", model)
    kind = type(module).__name__
    frame = user_line(traceback.extract_tb(error.__traceback__))
    at = f"submodule {name!r} ({kind})" if name else f"{kind}.forward"
    remedies = list(_remedies(model, name, kind))
    if not isinstance(error, StateError):
        rewritten = ["rewrite that line without Python control flow on tensors"]
        if frame is not None and frame.name != "forward":
            rewritten.append(f"if {frame.name!r} is a function, make it a single op with torch.fx.wrap({frame.name!r})")
        remedies = rewritten + remedies
        if has_example_inputs and not isinstance(model, fx.GraphModule):  # as after torch.export
            remedies.append('capture the model by torch.export, with capture="export"')
        if not has_example_inputs:
            remedies.append("pass example_inputs, which determine the sizes that Python branches on")
    remedies.append(WITHOUT_TRACING)
    return UntraceableError(
        f"prepare: cannot trace {type(model).__name__}: {type(error).__name__} in {at}: {error} At {describe_line(frame)}. "
        f"Remedies: {'; '.join(remedies)}.",
        name,
    )


def _remedies(model: nn.Module, name: str, kind: str) -> Iterable[str]:
    if name:
        yield f"make that submodule a leaf module with untraced=[{name!r}] or leaf_modules=[{kind}]"
    else:
        yield "move that code into a submodule and make it a leaf module with untraced or leaf_modules"
        with_layers = [n for n, part in model.named_children() if any(type(m) in QAT_MODULES for m in part.modules())]
        children = [f"model.{child} = qtoolkit.prepare(model.{child}, backend=...)" for child in with_layers]
        if children:
            yield "let qtoolkit.prepare_parts(model, example_inputs, backend=...) prepare the submodules that trace"
            yield f"prepare submodules on their own: {', '.join(children)}"
    parameters = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind not in VARIADIC]
    if CACHE in parameters:
        yield f"turn the cache of keys and values off with concrete_args={{{CACHE!r}: False}}"
    if len(parameters) > 1:
        yield f"fix an argument ({', '.join(parameters)}) with concrete_args"
