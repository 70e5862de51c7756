"""prepare(): the passes in order."""

from collections.abc import Mapping, Sequence
from typing import Literal, Never

import torch
from torch import nn

from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.config import QConfigMapping
from qtoolkit.config.mapping import (
    Exclude,
    check_qconfig_mapping,
    types_by_option,
    warn_of_unused_types,
    with_excluded,
)
from qtoolkit.eager.record import record_of
from qtoolkit.errors import check_flags, check_known, with_article
from qtoolkit.foreign import integration_of, warn_of_own_trainer
from qtoolkit.graph import passes
from qtoolkit.graph.capture import exported, trace
from qtoolkit.graph.capture.assignments import state_kept
from qtoolkit.graph.capture.attributes import plain_attributes
from qtoolkit.graph.graph_module import QuantizedGraphModule, compiled_once, names_of_own
from qtoolkit.graph.nodes import object_type_of
from qtoolkit.graph.passes.fuse_patterns import FusePatterns
from qtoolkit.graph.plan import Plan, Tracing
from qtoolkit.instead import refuse_others
from qtoolkit.layer_rules import LayerRules
from qtoolkit.model_inputs import bind, naming_misfits, split
from qtoolkit.model_state import changing, check_module, evaluating, random_state_kept
from qtoolkit.nn import QAT_MODULES, QuantModule, set_training_arithmetic
from qtoolkit.nn.computed_weights import put_parametrizations, take_parametrizations
from qtoolkit.nn.on_codes import Arithmetic, Saved, TrainingArithmetic
from qtoolkit.nn.registry import QatModules, check_table, weighted_types
from qtoolkit.quantizers.quantizer import store_weights_as
from qtoolkit.quantizers.switches import disable_quantization
from qtoolkit.report.lost_kernels import warn_of_lost_kernels


def prepare(
    model: nn.Module,
    example_inputs: object = None,
    backend: str | Backend = REQUIRED,
    qconfig_mapping: QConfigMapping | None = None,
    leaf_modules: Sequence[type[nn.Module]] = (),
    untraced: Sequence[str] = (),
    concrete_args: Mapping[str, object] | None = None,
    preserve_attributes: Sequence[str] | None = None,
    qat_modules: QatModules | None = None,
    fuse_patterns: FusePatterns | None = None,
    inplace: bool = False,
    training_arithmetic: Arithmetic = "auto",
    save: Saved = "codes",
    *,
    exclude: Exclude | None = None,
    capture: Literal["trace", "export"] = "trace",
    **other: Never,
) -> QuantizedGraphModule:
    """Turn a float model into one that can be calibrated and trained with quantization.

    In training mode (QAT) batch norms are trained, and folded by `convert`. In eval mode (PTQ) they are folded at once.
    Parameters keep their names. Call `qtoolkit.calibrate` next.

    If the model branches on `self.training`, the graph has both branches, and the model's mode selects one.

    Args:
        model: The float model. It is copied, unless `inplace`.
        example_inputs: A tuple of inputs, a mapping of keyword inputs, or one tensor. With them, Python that branches
            on sizes can be traced (each run then checks that its inputs take the same branches). Arguments that they do
            not give are fixed at their defaults (`*args` and `**kwargs` are empty). The model and its graph are run on
            them in eval mode and in the model's own mode, the prepared model in eval mode with quantizers off: a model
            that does not run, or whose graph computes something else, raises an error.
        backend: The target, which must be given: a name from `qtoolkit.backends`, or a Backend.
        qconfig_mapping: Which layers and ops get which config. Those without a rule get the backend's default.
        leaf_modules: Types of submodules that are not traced. The layers in them are quantized by module replacement, each
            with a quantizer of its input; batch norms in them do not change.
        untraced: Dotted names of submodules that are not traced, as `leaf_modules`. They are quantized too: layers that
            stay in float are named in `exclude`.
        concrete_args: Values of forward's arguments that are fixed at tracing.
        preserve_attributes: Dotted names of attributes and methods of the model, or of a submodule ("layer1.stride"),
            that the result, its copies and the converted model keep. Attributes that timm's optimizers and transforms
            read are kept anyway: `no_weight_decay`, `group_matcher` and `pretrained_cfg`.
        qat_modules: Float type -> QAT type, in addition to qtoolkit's own. Modules of the float type are leaf modules. A QAT
            type has a class method `from_float(module, weight, name, activation)`, as `qtoolkit.nn.QuantModule`.
        fuse_patterns: (module type or function, ...) -> fuser. Each chain of such ops, in which no other op takes the output
            of an op, is replaced by the module that `fuser(*modules)` returns, under the name of the first module. For a
            function the fuser gets None.
        inplace: Change the model itself, which must not be used afterwards. If prepare fails, the model is unchanged.
        training_arithmetic: How layers compute in training: "auto", "float" or "integer"; see
            `qtoolkit.nn.set_training_arithmetic`.
        save: What layers keep of their inputs for backward: `"codes"` or `"float"`, as there.
        exclude: The layers that stay in float, with all that is in them: dotted names, regular expressions for whole
            dotted names, module types and functions, one or several (`QConfigMapping.exclude`). `qconfig_mapping` does not
            change it.
        capture: How the model's Python becomes a graph. "trace": torch.fx, which keeps blocks, modes and sizes as
            they are. "export": torch.export, which follows more Python. Then blocks cannot be called on their own, and
            all sizes but a batch size of two or more are fixed by the example inputs. `untraced` and `concrete_args`
            raise an error.
        other: Must be empty. An argument name of another tool raises TypeError, which says what to write.

    Returns:
        A GraphModule with QAT layers, and activation quantizers named `activation_quantizers.<node>`.

    Warns:
        UserWarning: A config takes layers out of the target's integer kernels; or a rule or an option has no effect.

    Raises:
        UntraceableError: The model's Python cannot be traced, which the error explains with the source line and the remedies;
            or its graph computes something else than its forward for the example inputs.
        ValueError: A backend, a layer name or an option is not known. The error names the nearest known one.
        TypeError: `backend` is left out, or an argument is of a wrong type.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> prepared = prepare(model, (torch.zeros(1, 3, 8, 8),), backend="onnxruntime")
        >>> [name for name, _ in prepared.named_modules() if "quantizers." in name and "observer" not in name]
        ['activation_quantizers.input_1']
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [type(layer).__name__ for layer in prepare(model, backend="onnxruntime", exclude="2").children()][:3]
        ['QuantLinear', 'ReLU', 'Linear']
    """
    refuse_others(prepare, other)
    check_flags("prepare", inplace=inplace)
    _check_example_inputs(example_inputs)
    target = backend_of(backend)
    TrainingArithmetic(training_arithmetic, save)  # raises an error for what it does not know, before anything is done
    _check_model(model, qconfig_mapping)
    qconfig_mapping = with_excluded(qconfig_mapping, exclude)
    custom, patterns = qat_modules or {}, fuse_patterns or {}
    check_table(custom)
    passes.fuse_patterns.check(patterns)
    trace.check_leaf_modules(leaf_modules)
    _check_capture(capture, untraced, concrete_args)
    leaves = (*leaf_modules, *custom, *passes.fuse_patterns.module_types(patterns))
    with random_state_kept(model), changing(model, inplace, "prepare") as own:
        table = {**QAT_MODULES, **custom}
        parametrizations = take_parametrizations(own, weighted_types(table))
        rules = LayerRules.of(own, target, qconfig_mapping, table, custom)
        captured = own if capture == "trace" else exported.run(own, example_inputs, leaves)
        traced = trace.run(captured, leaves, untraced, concrete_args, preserve_attributes, example_inputs, own)
        gm, measured = traced.gm, example_inputs is not None
        tracing = Tracing(
            leaves, tuple(untraced), concrete_args, measured, traced.branches, model.training, traced.output_types,
            _values_of(own),
        )  # fmt: skip
        gm.plan = Plan(target, tracing=tracing, mapping=None if qconfig_mapping is None else qconfig_mapping.copy())
        with compiled_once():
            gm = passes.fuse_patterns.run(gm, patterns)
            gm = passes.recognize.run(gm, rules)
            rules.check_names(node.name for node in gm.graph.nodes if node.op in ("call_function", "call_method"))
            _warn_of_types(rules, gm, leaf_modules)
            gm = _quantized(gm, rules, training_arithmetic, save)
            store_weights_as(target.weight_codes, gm)
            put_parametrizations(gm, parametrizations)
            gm.set_kept()
            gm.divide(traced.calls)
        _note(gm, model, example_inputs, {"training_arithmetic": training_arithmetic, "save": save, "untraced": untraced,
            "concrete_args": concrete_args, "leaf_modules": leaf_modules, "preserve_attributes": preserve_attributes,
            "qat_modules": qat_modules, "fuse_patterns": fuse_patterns, "capture": capture})  # fmt: skip
        if example_inputs is not None:
            _try_out(gm, example_inputs)
    warn_of_lost_kernels("prepare", gm, target)
    return gm


def _values_of(model: nn.Module) -> dict[str, object]:
    """Return the plain values of a model that its graph has as constants, and the prepared model not as attributes."""
    own = names_of_own()
    return {name: value for name, value in plain_attributes(model).items() if name not in own}


def _quantized(
    gm: QuantizedGraphModule, rules: LayerRules, arithmetic: Arithmetic, save: Saved
) -> QuantizedGraphModule:
    """Run the passes that put QAT layers and quantizers into a graph."""
    gm = passes.leaf_modules.run(gm, rules)
    gm = passes.swap.run(gm, rules)
    gm = passes.link_batch_norms.run(gm, rules)
    gm = passes.fold_ahead.run(gm, rules)
    gm = passes.scale_channels.run(gm, rules)
    gm = passes.split_silu.run(gm, rules)
    gm = passes.insert.run(gm, rules)
    gm = passes.link_inputs.run(gm, rules.backend)
    set_training_arithmetic(gm, arithmetic, save)
    return passes.record.run(gm, rules)


def _note(gm: QuantizedGraphModule, model: nn.Module, example_inputs: object, options: Mapping[str, object]) -> None:
    """Let the config of a model of another package say how the model is prepared."""
    integration = integration_of(gm.model_class)
    if integration is not None:
        integration.note(gm, gm.plan, options, bind(model, example_inputs) if example_inputs is not None else None)


def _try_out(gm: QuantizedGraphModule, example_inputs: object) -> None:
    """Run a prepared model on example inputs in eval mode with quantizers off; its state does not change."""
    args, kwargs = split(example_inputs)
    with (
        naming_misfits(gm, example_inputs, "prepare: example_inputs do"),
        torch.no_grad(),
        evaluating(gm),
        disable_quantization(gm),
        state_kept(gm),  # a forward may count its calls, or update a codebook
    ):
        try:
            gm(*args, **kwargs)
        except LookupError as error:
            raise ValueError(
                f"prepare: the model does not run on example_inputs ({type(error).__name__}: {error}); they must have all "
                f"that forward reads from its *args and **kwargs."
            ) from error


def _warn_of_types(rules: LayerRules, gm: QuantizedGraphModule, leaf_modules: Sequence[type[nn.Module]]) -> None:
    """Warn of types that are not in the model: the options may serve several models, or have a typing error."""
    types = set(rules.types.values())
    ops = types | {object_type_of(node) for node in gm.graph.nodes if node.op.startswith("call")}
    bases = {base for kind in types for base in kind.__mro__}
    for option, kinds in types_by_option(rules.mapping).items():
        warn_of_unused_types(f"prepare: {option}", kinds, ops)
    warn_of_unused_types("prepare: leaf_modules names", leaf_modules, bases)
    warn_of_unused_types("prepare: qat_modules names", rules.custom, types)


def _check_model(model: nn.Module, mapping: QConfigMapping | None) -> None:
    check_module(model, "prepare")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "prepare: this call is inside torch.inference_mode, in which no model can be trained; call prepare outside of it."
        )
    if isinstance(model, QuantizedGraphModule):
        raise ValueError("prepare: this model is prepared already; prepare the float model.")
    trace.check_model(model)
    warn_of_own_trainer(model, "prepare")
    _check_not_replaced(model)
    check_qconfig_mapping("prepare", mapping)


def _check_example_inputs(example_inputs: object) -> None:
    """Raise TypeError for a backend or a mapping as the second argument, where some other tools take it."""
    if isinstance(example_inputs, str | Backend | QConfigMapping):
        names = "backend=..., qconfig_mapping=..." if isinstance(example_inputs, QConfigMapping) else "backend=..."
        raise TypeError(
            f"prepare: example_inputs must be the model's inputs, got {with_article(type(example_inputs))}; write "
            f"prepare(model, example_inputs, {names})."
        )


def _check_capture(capture: str, untraced: Sequence[str], concrete_args: Mapping[str, object] | None) -> None:
    check_known("capture of prepare:", capture, ("trace", "export"))
    given = [name for name, value in (("untraced", untraced), ("concrete_args", concrete_args)) if value]
    if capture == "export" and given:
        raise ValueError(
            f'prepare: {given[0]} is for capture="trace", got it with capture="export"; leave it out, and pass the values of '
            f"arguments in example_inputs."
        )


def _check_not_replaced(model: nn.Module) -> None:
    for name, module in model.named_modules():
        quantizers = (getattr(module, attribute, None) for attribute in ("input_quantizer", "output_quantizer"))
        is_quantized = isinstance(module, QuantModule) and any(q is not None for q in quantizers)
        if is_quantized or record_of(module).plan is not None:
            raise ValueError(
                f"prepare: {f'submodule {name!r}' if name else 'the model'} was quantized by module replacement already "
                f"(qtoolkit.quant_modules), so that tensors would be quantized twice; prepare the float model."
            )
