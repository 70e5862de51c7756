"""Module replacement: the road for models that no tracer takes. Layers quantize their own inputs and weights."""

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from qtoolkit.backends import Backend, backend_of
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.eager.constructors import CONSTRUCTION, Settings
from qtoolkit.eager.fuse import chains_of, link_chains, quantize_outputs
from qtoolkit.eager.rules import (
    FLOAT_FUNCTIONAL,
    PLAN,
    Decision,
    Ignore,
    ModuleRules,
    decide_all,
    entries_of,
    ignored_in,
    names_of,
    statuses_in,
)
from qtoolkit.errors import check_known, unknown
from qtoolkit.graph.capture import trace
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes import swap
from qtoolkit.graph.passes.leaf_modules import Chooser, replace_layers
from qtoolkit.graph.passes.swap import QatModules
from qtoolkit.graph.plan import Plan
from qtoolkit.model_state import deepcopy_model, unchanged_on_error
from qtoolkit.nn import REPLACED_MODULES
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.op_kinds.nodes import float_type

QUANTIZE = ("inputs", "outputs")
OUTPUT_ALONE = ("QuantStub", FLOAT_FUNCTIONAL)  # torch.ao's, by name


def replace(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | None = None,
    ignore: Ignore | None = None,
    inplace: bool = False,
    *,
    custom: QatModules | None = None,
    backend: str | Backend = "tensorrt",
    quantize: Literal["inputs", "outputs"] = "inputs",
) -> nn.Module:
    """Turn the layers of a float model into layers that quantize their own inputs and weights, without tracing it.

    Its Python stays as it is, control flow and all. Call `qtoolkit.calibrate` next; `qtoolkit.convert` and
    `qtoolkit.export_onnx` take the result, and `qtoolkit.quantization_report` tells of each layer what became of it, and
    why. Called again, it passes over what is quantized already.

    Each layer stays the same object with the same parameters: shared layers stay shared, and what refers to a layer, or
    holds a handle of one of its hooks, goes on working. (A bound method that was taken from a layer before, `f =
    layer.forward`, is torch's own and goes on computing in float.) So in place, an optimizer that was built before trains
    on; the scales of quantizer "lsq" are parameters that it does not know: build it afterwards, or call
    `optimizer.add_param_group`. On several GPUs, replace first and wrap then; DistributedDataParallel needs
    find_unused_parameters=True while learned scales are switched off.

    What is quantized, without a mapping, is what the backend computes in integers: with "tensorrt" the convolutions, linear
    layers, average pools, attention and recurrent layers, and `qtoolkit.nn`'s Add, MatMul and Cat. What follows from a graph
    is left to `qtoolkit.prepare`: quantized outputs, unsigned codes after a ReLU, wider first and last layers.

    Args:
        model: The float model. It is copied, unless `inplace`.
        qconfig_mapping: What to quantize how. The first of these that there is holds for a layer: the rule of its own name,
            of a regular expression, of its type; that of the nearest module around it, by name, regular expression or
            type; the global one; the backend's default. Rules for functions have no effect here, and are warned of.
        ignore: What to leave in float, with all that is in it: a module's dotted name or a pattern of `fnmatch`
            ("decoder.*"), a list of these, or a callable that is asked with each name and module.
        inplace: Change the model itself; if that fails, it is as it was.
        custom: Float type -> QAT type, on top of `qtoolkit.nn.REPLACED_MODULES`. A QAT type has a class method
            `from_float(module, weight, name, activation)`, as `qtoolkit.nn.QuantModule`.
        backend: A name from `qtoolkit.backends`, or a Backend: its default config, and which kinds of layers it computes.
        quantize: "inputs": layers quantize their inputs. "outputs": they quantize their outputs, each chain of
            `qtoolkit.fuse_modules` that of its last module, by a forward hook that runs before all others; of several
            outputs the first. So does a QuantStub, and a FloatFunctional. This is how torch.ao's eager mode does it.

    Returns:
        The model, or its copy, with QAT layers.

    Raises:
        ValueError: A name or option is not known, a spec does not fit a weight, or the model is prepared already.
        TypeError: An argument is of a wrong type, or the model cannot be copied.
        UntraceableError: The model is wrapped or compiled, or has lazy parameters.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> replaced = replace(model, ignore="2")
        >>> [type(layer).__name__ for layer in replaced]
        ['QuantLinear', 'ReLU', 'Linear']
        >>> report = qt.calibrate(replaced, [torch.ones(1, 4)], progress=False)
        >>> report.ranges["0.input_quantizer"]
        (1.0, 1.0)
    """
    target = backend_of(backend)
    check_known("quantize", quantize, QUANTIZE)
    _check(model, qconfig_mapping, custom)
    table = {**REPLACED_MODULES, **(custom or {})}
    if qconfig_mapping is not None:
        qconfig_mapping.check_names(_names(model, table))
    rules = ModuleRules(
        target, table, qconfig_mapping, frozenset(custom or ()), ignored_in(model, ignore), names_of(model)
    )
    _warn_of_types(model, qconfig_mapping, custom or {})
    decisions = decide_all(model, rules, statuses_in(model))
    outputs = _output_specs(model, rules, decisions) if quantize == "outputs" else {}
    norms = [chain[1] for chain in chains_of(model)]
    apart = {name: reason for name in norms if (reason := rules.reason_apart(model.get_submodule(name))) is not None}
    with unchanged_on_error(model) if inplace else nullcontext():
        own = model if inplace else deepcopy_model(model, what="replace")
        replace_layers(own, [""], _chooser(decisions), table, quantize == "inputs", "replace")
        statuses = {name: (decision.status, decision.reason) for name, decision in decisions.items()}
        statuses |= link_chains(own, target.batch_norm, apart)
        statuses |= quantize_outputs(own, outputs)
        setattr(own, PLAN, Plan(target, inside=statuses))
    return own


def initialize(
    qconfig_mapping: QConfigMapping | None = None,
    ignore: Ignore | None = None,
    custom: QatModules | None = None,
    *,
    backend: str | Backend = "tensorrt",
) -> "Active":
    """Let torch's layers quantize their inputs and weights when they are built, from now on.

    `torch.nn.Linear(...)` then builds a `qtoolkit.nn.QuantLinear`, under whatever name the class was imported, and so on for
    all types that `replace` knows; models that were built before are for `replace`. Only constructors change: float layers
    are still instances of torch's classes, and copies and unpickled layers are what they were. Layers of subclasses stay
    float, and so do lazy ones.

    It acts at once, for all threads, until `deactivate()`; as a context manager, until the block ends, also by an error:
    then what was before it holds again, quantized or not. Called again with equal arguments it changes nothing, with others
    those hold from then on.

    Args:
        qconfig_mapping: What to quantize how: by rules for types, and a global one. As `replace` takes it otherwise.
        ignore: Types that stay float, by their class names or patterns of `fnmatch` ("Conv*"), or a callable that is asked
            with "" and each layer.
        custom: Float type -> QAT type, as `replace` takes it.
        backend: As `replace` takes it.

    Returns:
        The context manager.

    Raises:
        ValueError: A name is not known, or a rule is for a layer's name, which it does not have yet.
        TypeError: An argument is of a wrong type.

    Example:
        >>> with initialize(ignore="Conv2d"):
        ...     model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in model]
        ['Conv2d', 'Flatten', 'QuantLinear']
        >>> type(torch.nn.Linear(4, 2)).__name__
        'Linear'
    """
    target = backend_of(backend)
    _check_rules("initialize", qconfig_mapping, custom)
    table = {**REPLACED_MODULES, **(custom or {})}
    _check_has_no_names(qconfig_mapping)
    rules = ModuleRules(target, table, copy.deepcopy(qconfig_mapping), frozenset(custom or ()))
    return Active(Settings(rules, _ignored_types(ignore, table)))


def deactivate() -> None:
    """Let torch's layers be torch's own when they are built, from now on. Where they are, this changes nothing.

    Example:
        >>> _ = initialize()
        >>> type(torch.nn.Linear(4, 2)).__name__
        'QuantLinear'
        >>> deactivate()
        >>> type(torch.nn.Linear(4, 2)).__name__
        'Linear'
    """
    CONSTRUCTION.switch(None)


class Active(AbstractContextManager["Active"]):
    """What `initialize` returns: layers are built quantized, in a `with` block until it ends. It can be entered again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._replaced = [CONSTRUCTION.settings]  # what the first block goes back to
        self._before: list[Settings | None] = []
        CONSTRUCTION.switch(settings)

    def __enter__(self) -> Self:
        now = CONSTRUCTION.settings
        replaced = self._replaced if now == self._settings else []
        self._before.append(replaced.pop() if replaced else now)
        self._replaced = []
        CONSTRUCTION.switch(self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        CONSTRUCTION.switch(self._before.pop())


def _check(model: nn.Module, mapping: QConfigMapping | None, custom: QatModules | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, QuantizedGraphModule):
        raise ValueError("replace: this model is prepared already; replace the layers of the float model.")
    trace.check_model(model, "replace")
    _check_rules("replace", mapping, custom)


def _check_rules(what: str, mapping: QConfigMapping | None, custom: QatModules | None) -> None:
    if mapping is not None and not isinstance(mapping, QConfigMapping):
        raise TypeError(f"{what}: qconfig_mapping must be a QConfigMapping, got {type(mapping).__name__}.")
    swap.check_table({} if custom is None else custom, what, "custom")


def _warn_of_types(model: nn.Module, mapping: QConfigMapping | None, custom: QatModules) -> None:
    """Warn of types that the model does not have, and of functions, which nobody sees here."""
    types = {float_type(module) for module in model.modules()}
    unused = [
        ("qconfig_mapping has a rule for", kind) for kind in ([] if mapping is None else mapping.rules["object_type"])
    ]
    unused += [("custom names", kind) for kind in custom]
    for what, kind in unused:
        if kind not in types:
            lacks = (
                "which no module of the model is" if isinstance(kind, type) else "a function: only modules are replaced"
            )
            name = getattr(kind, "__name__", kind)
            warnings.warn(f"replace: {what} {name}, {lacks}: nothing follows from it.", stacklevel=3)


def _names(model: nn.Module, table: QatModules) -> list[str]:
    """Return the names that rules can name: of all modules, of the model itself where it is a layer."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return names if type(model) in table else names[1:]


def _output_specs(model: nn.Module, rules: ModuleRules, decisions: Mapping[str, Decision]) -> dict[str, QuantSpec]:
    """Return how each unit's output is quantized, by the name of its (first) module."""
    specs = {name: decision.qconfig.activation for name, decision in decisions.items() if decision.qconfig is not None}
    heads = {chain[0] for chain in chains_of(model)}
    for name, module in model.named_modules():
        is_unit = type(module).__name__ in OUTPUT_ALONE or (name in heads and is_batch_norm(module))
        if is_unit and name in decisions and decisions[name].status == "float":
            specs[name] = rules.output_spec(module)
    return {name: spec for name, spec in specs.items() if spec is not None}


def _chooser(decisions: Mapping[str, Decision]) -> Chooser:
    def choose(name: str, module: nn.Module, qat_type: type[Any]) -> QConfig | None:
        return decisions[name].qconfig if name in decisions else None

    return choose


def _check_has_no_names(mapping: QConfigMapping | None) -> None:
    rules = {} if mapping is None else mapping.rules
    for name in (*rules.get("module_name", ()), *rules.get("module_name_regex", ())):
        raise ValueError(
            f"initialize: the qconfig_mapping has a rule for the name {name!r}, but layers have no names yet when they are "
            f"built; give rules for types, or build the model and use qtoolkit.quant_modules.replace."
        )


def _ignored_types(ignore: Ignore | None, table: QatModules) -> tuple[str, ...] | Callable[[str, nn.Module], bool]:
    if ignore is None:
        return ()
    if callable(ignore) and not isinstance(ignore, type):
        return ignore
    names = [kind.__name__ for kind in table]
    entries = entries_of(ignore, "initialize")
    for entry in entries:
        if not any(fnmatchcase(name, entry) for name in names):
            raise ValueError("initialize: ignore: " + unknown("layer type", entry, names))
    return tuple(entries)
