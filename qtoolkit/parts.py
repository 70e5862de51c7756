"""Models that do not trace as a whole, such as detectors: the parts that trace are prepared, the other layers replaced."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Never

import torch
from torch import nn

from qtoolkit.backends import REQUIRED, Backend, backend_of, backends
from qtoolkit.config import QConfigMapping
from qtoolkit.config.mapping import Exclude, with_excluded
from qtoolkit.errors import check_flags, check_sequence, some
from qtoolkit.graph.capture.assignments import state_kept
from qtoolkit.graph.capture.signature import VARIADIC
from qtoolkit.graph.capture.trace import check_model
from qtoolkit.graph.capture.untraceable import UntraceableError
from qtoolkit.instead import refuse_others
from qtoolkit.model_inputs import Args, Kwargs, bind, naming_misfits, split
from qtoolkit.model_state import changing, check_module, evaluating, removing
from qtoolkit.nn import QAT_MODULES
from qtoolkit.nn.registry import imported_types
from qtoolkit.prepare import prepare
from qtoolkit.quant_modules import replace


def prepare_parts(
    model: nn.Module,
    example_inputs: object,
    parts: Sequence[str] | None = None,
    backend: str | Backend = REQUIRED,
    qconfig_mapping: QConfigMapping | None = None,
    inplace: bool = False,
    *,
    exclude: Exclude | None = None,
    **other: Never,
) -> nn.Module:
    """Quantize a model that `prepare` cannot trace as a whole: prepare the submodules that trace, and replace the other layers.

    Each part is prepared with the inputs that it gets when the model runs on the example inputs, and takes the place of the
    submodule; the model's Python around the parts stays as it is. Detectors of torchvision are quantized so: backbone, feature
    pyramid and heads are graphs, and anchors and boxes are chosen in Python. `qtoolkit.calibrate`, training and
    `qtoolkit.convert` take the result. `qtoolkit.export_onnx` takes a converted part: `converted.backbone`.

    Args:
        model: The float model. It is copied, unless `inplace`.
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one input. The model runs on them in eval mode.
        parts: Dotted names of the submodules that are prepared, without submodules of others. None: the outermost that
            trace, have at least two layers, and are called once in that run.
        backend: The target, which must be given, as in `prepare`.
        qconfig_mapping: As in `prepare`, by names in the whole model. Rules for functions by the names of their nodes have no
            effect.
        inplace: Change the model itself. If the call fails, the model is unchanged.
        exclude: The layers that stay in float, as in `prepare`.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        The model, or its copy.

    Raises:
        ValueError: A part is not in the model, is not called exactly once, or lies in another one; or no submodule traces.
        UntraceableError: A part that is named does not trace.
        TypeError: `backend` is left out, or `parts` is one string.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        ...         self.head = torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         x = self.body(x)
        ...         return [self.head(row) for row in x if row.sum() > 0]
        >>> prepared = prepare_parts(Net(), torch.ones(3, 4), backend="onnxruntime")
        >>> type(prepared).__name__, type(prepared.body).__name__, type(prepared.head).__name__
        ('Net', 'Sequential', 'QuantLinear')
        >>> isinstance(prepared.body, qt.graph.QuantizedGraphModule)
        True
    """
    check_flags("prepare_parts", inplace=inplace)
    refuse_others(prepare_parts, other)
    if isinstance(parts, str) and parts in backends:
        raise TypeError(f"prepare_parts: parts must be a sequence of names, got a backend; write backend={parts!r}.")
    target = backend_of(backend)
    check_module(model, "prepare_parts")
    check_model(model, "prepare_parts")
    mapping = with_excluded(qconfig_mapping, exclude)
    with changing(model, inplace, "prepare_parts") as own:
        calls = _calls(own, example_inputs)
        _check(own, parts, calls)
        found = list(_prepared(own, calls, parts, target, mapping))
        if not found:
            raise ValueError(
                f"prepare_parts: no submodule with two layers or more traces and is called once; quantize the model by "
                f"qtoolkit.quant_modules.replace. Called once were: {some(sorted(calls))}."
            )
        for name, part in found:
            own.set_submodule(name, part)
        return replace(own, mapping, backend=target, inplace=True)


Calls = dict[str, object]  # the inputs of the submodules that are called once, by the names of their arguments


def _calls(model: nn.Module, example_inputs: object) -> Calls:
    """Run a model, and return the inputs of its submodules."""
    found: dict[str, list[object]] = {}
    names = {module: name for name, module in model.named_modules() if name}

    def note(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        found.setdefault(names[module], []).append(None if _is_variadic(module) else dict(bound))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in names]
    args, kwargs = split(example_inputs)
    bind(model, example_inputs, "prepare_parts: example_inputs do")
    fitting = naming_misfits(model, example_inputs, "prepare_parts: example_inputs do")
    with removing(hooks), torch.no_grad(), evaluating(model), state_kept(model), fitting:
        model(*args, **kwargs)
    return {name: calls[0] for name, calls in found.items() if len(calls) == 1 and calls[0] is not None}


def _is_variadic(module: nn.Module) -> bool:
    return any(p.kind in VARIADIC for p in inspect.signature(module.forward).parameters.values())


def _check(model: nn.Module, parts: Sequence[str] | None, calls: Calls) -> None:
    if parts is not None:
        check_sequence(parts, "prepare_parts", "parts")
    known = {name for name, _ in model.named_modules()}
    for part in parts or ():
        around = [other for other in parts or () if part.startswith(f"{other}.")]
        if part in calls and not around:
            continue
        why = "the model does not call it exactly once, or it takes *args or **kwargs"
        if part not in known:
            why = "the model has no submodule of this name"
        elif around:
            why = f"it lies in the part {around[0]!r}"
        called = some(sorted(calls), most=20)
        raise ValueError(f"prepare_parts: parts names {part!r}, but {why}. Called once were: {called}.")


def _prepared(
    model: nn.Module, calls: Calls, parts: Sequence[str] | None, backend: Backend, mapping: QConfigMapping | None
) -> Iterator[tuple[str, nn.Module]]:
    """Prepare the parts that are named, or the outermost that trace."""
    done: list[str] = []
    for name in calls if parts is None else parts:
        part = model.get_submodule(name)
        if parts is None and (_layers_in(part) < 2 or any(name.startswith(f"{other}.") for other in done)):
            continue
        try:
            rules, kept = _of_part(name, part, mapping), _attributes_of(part)
            yield name, prepare(part, calls[name], backend, rules, preserve_attributes=kept)
        except UntraceableError:
            if parts is not None:
                raise
            continue
        done.append(name)


def _attributes_of(part: nn.Module) -> list[str]:
    """Return the attributes of a part that the model may read besides its forward, such as a method for the loss of a head."""
    own_classes = [kind for kind in type(part).__mro__ if not _is_of_torch(kind)]
    names = sorted({name for kind in own_classes for name in vars(kind)}.difference(dir(nn.Module)))
    found = [name for name in names if name[0] != "_" and inspect.ismethod(getattr(part, name))]
    bare = vars(nn.Module())
    for inner, module in part.named_modules():
        own = () if _is_of_torch(type(module)) else vars(module).keys() - bare
        found += [f"{inner}.{name}" if inner else name for name in sorted(own)]
    return found


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


def _layers_in(part: nn.Module) -> int:
    known = {*QAT_MODULES, *imported_types()}
    return sum(type(module) in known for module in part.modules())


def _of_part(name: str, part: nn.Module, mapping: QConfigMapping | None) -> QConfigMapping | None:
    """Return the rules of a whole model for a part: rules for its layers, by their names in it, and for functions."""
    if mapping is None:
        return None
    found = mapping.copy()
    found.excluded = None
    found.rules["module_name"], found.rules["module_name_regex"] = {}, {}
    kinds = {f"{name}.{inner}": type(module) for inner, module in part.named_modules() if inner}
    for full, kind in kinds.items():
        parents = [full.rsplit(".", depth)[0] for depth in range(1, full.count(".") + 1)]
        match = mapping.match(full, kind, [(parent, kinds.get(parent)) for parent in parents])
        if match is not None and match.source != "global":
            found.set_module_name(full.removeprefix(f"{name}."), match.qconfig)
    return found
