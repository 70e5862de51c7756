"""Module replacement: the road for models that no tracer takes. Layers quantize their own inputs and weights."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

from torch import nn

from qtoolkit.backends import Backend, backend_of
from qtoolkit.config import QConfig, QConfigMapping
from qtoolkit.graph import swap, trace
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.graph.module_rules import (
    PLAN,
    Decision,
    Ignore,
    ModuleRules,
    decide_all,
    ignored_in,
    names_of,
    statuses_in,
)
from qtoolkit.graph.plan import Plan
from qtoolkit.graph.replace import Chooser, replace_layers
from qtoolkit.graph.swap import QatModules
from qtoolkit.graph.transaction import copy_of, unchanged_on_error
from qtoolkit.names import check_known
from qtoolkit.nn import REPLACED_MODULES

QUANTIZE = ("inputs", "outputs")


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
    `optimizer.add_param_group`. On several GPUs, replace first and wrap then.

    What is quantized, without a mapping, is what the backend computes in integers: with "tensorrt" the convolutions, linear
    layers, average pools, attention and recurrent layers, and `qtoolkit.nn`'s Add, MatMul and Cat. What follows from a graph
    is left to `qtoolkit.prepare`: quantized outputs, unsigned codes after a ReLU, wider first and last layers.

    Args:
        model: The float model. It is copied, unless `inplace`.
        qconfig_mapping: What to quantize how. The first of these that there is holds for a layer: the rule of its own name,
            of a regular expression, of its type; that of the nearest module around it, by name, regular expression or
            type; the global one; the backend's default. Rules for functions have no effect here.
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
    decisions = decide_all(model, rules, statuses_in(model))
    with unchanged_on_error(model) if inplace else nullcontext():
        own = model if inplace else copy_of(model, what="replace")
        replace_layers(own, [""], _chooser(decisions), table, quantize == "inputs", "replace")
        statuses = {name: (decision.status, decision.reason) for name, decision in decisions.items()}
        setattr(own, PLAN, Plan(target, inside=statuses))
    return own


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


def _names(model: nn.Module, table: QatModules) -> list[str]:
    """Return the names that rules can name: of all modules, of the model itself where it is a layer."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return names if type(model) in table else names[1:]


def _chooser(decisions: Mapping[str, Decision]) -> Chooser:
    def choose(name: str, module: nn.Module, qat_type: type[Any]) -> QConfig | None:
        return decisions[name].qconfig if name in decisions else None

    return choose
