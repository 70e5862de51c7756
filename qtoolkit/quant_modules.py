"""Module replacement, for models that cannot be traced: layers quantize their own inputs and weights."""

import copy
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Literal, Never, Self

from torch import nn

from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.config import QConfigMapping, QuantSpec
from qtoolkit.config.mapping import (
    PLAIN_NAME,
    Exclude,
    check_qconfig_mapping,
    types_by_option,
    warn_of_unused_types,
    with_excluded,
)
from qtoolkit.eager.constructors import CONSTRUCTION, Settings
from qtoolkit.eager.fuse import link_chains, quantize_outputs
from qtoolkit.eager.record import chains_of, record_of
from qtoolkit.eager.rules import (
    FLOAT_FUNCTIONAL,
    Ignore,
    decide_all,
    entries_of,
    names_ignored,
    quantized_otherwise,
    record_plan,
)
from qtoolkit.errors import check_flags, check_known, some, unknown, warn
from qtoolkit.foreign import integration_of, warn_of_own_trainer
from qtoolkit.graph.capture import trace
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import float_type
from qtoolkit.graph.passes.link_inputs import link_own_inputs
from qtoolkit.instead import refuse_others
from qtoolkit.layer_rules import LayerDecision, LayerRules
from qtoolkit.model_state import changing, check_module
from qtoolkit.nn import replaced_modules, set_training_arithmetic
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.computed_weights import put_parametrizations, take_parametrizations
from qtoolkit.nn.on_codes import Arithmetic, Saved, TrainingArithmetic
from qtoolkit.nn.registry import QatModules, check_table, weighted_types
from qtoolkit.nn.replacement import replace_layers
from qtoolkit.report.lost_kernels import lost_kernels, warn_of_lost_kernels
from qtoolkit.shared_modules import modules_by_name
from qtoolkit.verdicts import Status

QUANTIZE = ("inputs", "outputs")
OUTPUT_ALONE = ("QuantStub", FLOAT_FUNCTIONAL)  # modules of torch.ao that quantize their output, by name


def replace(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | None = None,
    ignore: Ignore | None = None,
    inplace: bool = False,
    *,
    exclude: Exclude | None = None,
    custom: QatModules | None = None,
    backend: str | Backend = REQUIRED,
    quantize: Literal["inputs", "outputs"] = "inputs",
    training_arithmetic: Arithmetic = "auto",
    save: Saved = "codes",
    **other: Never,
) -> nn.Module:
    """Replace the layers of a float model by layers that quantize their own inputs and weights, without tracing it.

    The model's Python stays as it is, with its control flow. Call `qtoolkit.calibrate` next. `qtoolkit.convert` and
    `qtoolkit.export_onnx` take the result, and `qtoolkit.quantization_report` lists the status of each layer with the reason.
    A second call skips layers that are quantized already, and warns of layers for which its rules give another config.

    Each layer stays the same object with the same parameters: shared layers stay shared, and references to a layer and
    handles of its hooks remain valid. (A bound method taken from a layer before, `f = layer.forward`, still computes in
    float.) With `inplace`, an optimizer built before therefore keeps training the model. It does not contain the learned
    scales of quantizer "lsq": build it afterwards, or call `optimizer.add_param_group`. For several GPUs, replace first and
    wrap the result. DistributedDataParallel needs find_unused_parameters=True while learned scales are switched off.

    Without a mapping, the layers that the backend computes in integers are quantized: with "tensorrt" the convolutions, linear
    layers, average pools, attention and recurrent layers, and `qtoolkit.nn`'s Add, MatMul and Cat. Rules that need a graph
    apply only in `qtoolkit.prepare`: quantized outputs, unsigned activations after a ReLU, more bits in first and last layers.

    Args:
        model: The float model. It is copied, unless `inplace`.
        qconfig_mapping: Which layers get which config. A rule for a module around a layer applies to the layer too: see
            `QConfigMapping`. Layers without a rule get the backend's default. Rules for functions have no effect here and
            raise a warning.
        ignore: As `exclude`, in another form: a dotted name or a pattern of `fnmatch` ("decoder.*"), a list of these,
            or a callable that is called with each name and module.
        inplace: Change the model itself. If the call fails, the model is unchanged.
        exclude: The layers that stay in float, with all that is in them: dotted names, regular expressions for whole
            dotted names, and module types, one or several (`QConfigMapping.exclude`). `qconfig_mapping` does not change it.
        custom: Float type -> QAT type, in addition to `qtoolkit.nn.REPLACED_MODULES`. A QAT type has a class method
            `from_float(module, weight, name, activation)`, as `qtoolkit.nn.QuantModule`.
        backend: The target, which must be given: a name from `qtoolkit.backends`, or a Backend. It gives the default
            config and the kinds of layers that are quantized. "tensorrt10" has float32 scales, as
            pytorch-quantization's scripts expect; "tensorrt", which is TensorRT 11, has float16 scales.
        quantize: "inputs": layers quantize their inputs. "outputs": layers quantize their outputs, by a forward hook that runs
            before all others; a layer with several outputs quantizes the first. A chain of `qtoolkit.fuse_modules` quantizes
            the output of its last module. QuantStub and FloatFunctional quantize their outputs too, as in torch.ao's eager
            mode.
        training_arithmetic: How layers compute in training: "auto", "float" or "integer"; see
            `qtoolkit.nn.set_training_arithmetic`.
        save: What layers keep of their inputs for backward: `"codes"` or `"float"`, as there.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        The model, or its copy, with QAT layers.

    Raises:
        ValueError: A name or option is not known, a spec does not fit a weight, or the model is already prepared.
        TypeError: `backend` is left out, an argument has a wrong type, or the model cannot be copied.
        UntraceableError: The model is wrapped or compiled, or has lazy parameters.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> replaced = replace(model, backend="tensorrt", exclude="2")
        >>> [type(layer).__name__ for layer in replaced]
        ['QuantLinear', 'ReLU', 'Linear']
        >>> report = qt.calibrate(replaced, [torch.ones(1, 4)], progress=False)
        >>> report.ranges["0.input_quantizer"]
        (1.0, 1.0)
    """
    refuse_others(replace, other)
    check_flags("replace", inplace=inplace)
    target = backend_of(backend)
    check_known("quantize", quantize, QUANTIZE)
    TrainingArithmetic(training_arithmetic, save)  # raises an error for what it does not know, before anything is done
    _check(model, qconfig_mapping, custom)
    table = {**replaced_modules(), **(custom or {})}
    mapping = with_excluded(qconfig_mapping, exclude)
    mapping = with_excluded(mapping, map(_as_excluded, names_ignored(model, ignore)))
    with changing(model, inplace, "replace") as own:
        parametrizations = take_parametrizations(own, weighted_types(table))
        configs = LayerRules.of(own, target, mapping, table, custom or ())
        configs.check_names()
        _warn_of_types(own, mapping, custom or {})
        _warn_of_kept(own, configs)
        known = lost_kernels(own)
        _replace(own, configs, quantize)
        set_training_arithmetic(own, training_arithmetic, save)
        put_parametrizations(own, parametrizations)
        integration = integration_of(type(own))
        if integration is not None:
            options = {"quantize": quantize, "training_arithmetic": training_arithmetic, "save": save, "custom": custom}
            integration.note(own, record_of(own).plan, {**options, "fuse_modules": set(chains_of(own))})
    warn_of_lost_kernels("replace", own, target, known)
    return own


class Active(AbstractContextManager["Active"]):
    """The context manager that `initialize` returns: constructors build quantized layers. It can be entered again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._replaced = [CONSTRUCTION.settings]  # restored after the first block
        self._before: list[Settings | None] = []
        CONSTRUCTION.switch(settings)

    def __enter__(self) -> Self:
        now = CONSTRUCTION.settings
        replaced = self._replaced if now == self._settings else []
        self._before.append(replaced.pop() if replaced else now)
        self._replaced = []
        CONSTRUCTION.switch(self._settings)
        return self

    def __exit__(self, *error: object) -> None:
        CONSTRUCTION.switch(self._before.pop())


def initialize(
    qconfig_mapping: QConfigMapping | None = None,
    ignore: Ignore | None = None,
    custom: QatModules | None = None,
    *,
    exclude: Exclude | None = None,
    backend: str | Backend = REQUIRED,
    **other: Never,
) -> Active:
    """Make the constructors of torch's layers build layers that quantize their inputs and weights, from now on.

    `torch.nn.Linear(...)` then builds a `qtoolkit.nn.QuantLinear`, under any imported name of the class. The same holds
    for all types that `replace` quantizes. For models that were built before, call `replace`. Only constructors change: float
    layers remain instances of torch's classes, and copies and unpickled layers keep their types. Layers of subclasses and
    lazy layers stay in float.

    It takes effect at once, in all threads, until `deactivate()`. As a context manager, it ends with the block, also if the
    block raises; the settings from before then apply again. A second call with equal arguments has no effect; with other
    arguments, these replace the earlier ones.

    Args:
        qconfig_mapping: How layers are quantized: rules for types, and a global rule. Otherwise as `replace` takes it.
        ignore: Types that stay in float: class names or patterns of `fnmatch` ("Conv*"), or a callable that is called with ""
            and each layer.
        custom: Float type -> QAT type, as `replace` takes it.
        exclude: Types that stay in float.
        backend: As `replace` takes it.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        The context manager.

    Raises:
        ValueError: A name is not known, or a rule is for a layer's name: layers have no names when they are built.
        TypeError: `backend` is left out, or an argument has a wrong type.

    Example:
        >>> with initialize(backend="tensorrt", exclude=torch.nn.Conv2d):
        ...     model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
        >>> [type(layer).__name__ for layer in model]
        ['Conv2d', 'Flatten', 'QuantLinear']
        >>> type(torch.nn.Linear(4, 2)).__name__
        'Linear'
    """
    refuse_others(initialize, other)
    target = backend_of(backend)
    _check_rules("initialize", qconfig_mapping, custom)
    table = {**replaced_modules(), **(custom or {})}
    mapping = with_excluded(copy.deepcopy(qconfig_mapping), exclude)
    _check_has_no_names(mapping)
    called = ignore if callable(ignore) and not isinstance(ignore, type) else None
    if called is None:
        mapping = with_excluded(mapping, _ignored_types(ignore, table))
    return Active(Settings(LayerRules(target, mapping, table, frozenset(custom or ())), called))


def deactivate() -> None:
    """Restore the constructors of torch's layers. If they are not changed, the call has no effect.

    Example:
        >>> _ = initialize(backend="tensorrt")
        >>> type(torch.nn.Linear(4, 2)).__name__
        'QuantLinear'
        >>> deactivate()
        >>> type(torch.nn.Linear(4, 2)).__name__
        'Linear'
    """
    CONSTRUCTION.switch(None)


def _replace(model: nn.Module, rules: LayerRules, quantize: str) -> None:
    """Replace the layers of a model, and link and quantize its chains, by rules."""
    decisions = decide_all(model, rules)
    outputs = _output_specs(model, rules, decisions) if quantize == "outputs" else {}
    modules = modules_by_name(model)
    norms = {name: rules.of_module(modules[name]) for _, name, *_ in chains_of(model) if name in modules}
    not_linked = {name: rule.left for name, rule in norms.items() if rule.qconfig is None}
    qconfigs = {name: decision.qconfig for name, decision in decisions.items()}
    replace_layers(model, [""], lambda name, *_: qconfigs.get(name), rules.table, quantize == "inputs", "replace")
    link_own_inputs(model, rules.backend)
    verdicts = {name: decision.verdict for name, decision in decisions.items()}
    verdicts |= link_chains(model, rules.backend.batch_norm, not_linked)
    verdicts |= quantize_outputs(model, outputs)
    record_plan(model, rules, verdicts)


def _check(model: nn.Module, mapping: QConfigMapping | None, custom: QatModules | None) -> None:
    check_module(model, "replace")
    if isinstance(model, QuantizedGraphModule):
        raise ValueError("replace: this model is already prepared; call replace on the float model.")
    trace.check_model(model, "replace")
    warn_of_own_trainer(model, "replace")
    _check_rules("replace", mapping, custom)


def _check_rules(what: str, mapping: QConfigMapping | None, custom: QatModules | None) -> None:
    check_qconfig_mapping(what, mapping)
    check_table({} if custom is None else custom, what, "custom")


def _warn_of_types(model: nn.Module, mapping: QConfigMapping | None, custom: QatModules) -> None:
    """Warn of types that are not in the model, and of functions, which module replacement does not see."""
    types = {float_type(module) for module in model.modules()}
    for option, kinds in types_by_option(mapping).items():
        functions = [kind for kind in kinds if not isinstance(kind, type)]
        warn_of_unused_types(f"replace: {option}", [kind for kind in kinds if isinstance(kind, type)], types)
        warn_of_unused_types(f"replace: {option}", functions, (), "is a function (replace quantizes modules only)")
    warn_of_unused_types("replace: custom names", custom, types)


def _warn_of_kept(model: nn.Module, rules: LayerRules) -> None:
    """Warn of layers that are quantized already, for which the rules of this call have no effect."""
    names = quantized_otherwise(model, rules)
    if names:
        warn(
            f"replace: qconfig_mapping, exclude or backend gives another config for layers that are quantized already, which "
            f"keep theirs: {some(list(map(repr, names)))}; replace the float model, with all rules in one call.",
        )


def _output_specs(model: nn.Module, rules: LayerRules, decisions: Mapping[str, LayerDecision]) -> dict[str, QuantSpec]:
    """Return the spec of each quantized output, by the name of the layer or of the chain's first module."""
    specs = {name: decision.qconfig.activation for name, decision in decisions.items() if decision.qconfig is not None}
    chain_starts = {chain[0] for chain in chains_of(model)}
    for name, module in model.named_modules():
        is_unit = type(module).__name__ in OUTPUT_ALONE or (name in chain_starts and is_batch_norm(module))
        if is_unit and name in decisions and decisions[name].verdict.status is Status.FLOAT:
            qconfig = rules.of_module(module).qconfig
            specs[name] = None if qconfig is None else qconfig.activation
    return {name: spec for name, spec in specs.items() if spec is not None}


def _as_excluded(name: str) -> str:
    """Return the name of a module as `exclude` takes it."""
    return name if PLAIN_NAME.fullmatch(name) else re.escape(name)


def _check_has_no_names(mapping: QConfigMapping | None) -> None:
    of = {"qconfig_mapping has a rule for": mapping, "exclude has": None if mapping is None else mapping.excluded}
    for option, rules in ((option, rules.rules) for option, rules in of.items() if rules is not None):
        for name in (*rules["module_name"], *rules["module_name_regex"]):
            raise ValueError(
                f"initialize: {option} the name {name!r}, but layers have no names when they are built; use types, or build "
                f"the model and call qtoolkit.quant_modules.replace."
            )


def _ignored_types(ignore: Ignore | None, table: QatModules) -> Iterable[type[nn.Module]]:
    """Return the types of layers that `initialize` leaves in float, by the names and patterns of its `ignore`."""
    names = [kind.__name__ for kind in table]
    for entry in () if ignore is None else entries_of(ignore, "initialize"):
        if not any(fnmatchcase(name, entry) for name in names):
            raise ValueError("initialize: ignore: " + unknown("layer type", entry, names))
        yield from (kind for kind in table if fnmatchcase(kind.__name__, entry))
