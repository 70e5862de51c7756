"""Which layers module replacement quantizes, how, and why others stay float."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils import parametrize

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.eager.record import plans_in, record_of, set_record, verdicts_in
from qtoolkit.errors import shown, unknown
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import float_type, kind_of_module
from qtoolkit.graph.plan import Plan
from qtoolkit.layer_rules import LayerDecision, LayerRules
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.registry import QatModules
from qtoolkit.quantizers.quantizer import Quantizer, store_weights_as
from qtoolkit.shared_modules import modules_by_name
from qtoolkit.verdicts import Cause, Status, Verdict

Ignore = str | Iterable[str] | Callable[[str, nn.Module], bool]

# Modules of torch.ao's eager mode, by name, because torch.ao may be absent.
STUBS = ("QuantStub", "DeQuantStub")
FLOAT_FUNCTIONAL = "FloatFunctional"
BY_REPLACEMENT = Verdict.quantized(Cause.REPLACED, "by module replacement")
PATCHED = Verdict.left_float(Cause.NO_QAT_TYPE, "its forward is an attribute of this one module; define it in a class")


def decide_layer(module: nn.Module, rules: LayerRules) -> LayerDecision:
    """Return how module replacement quantizes a float layer; ValueError if its names have different rules."""
    if type(module) not in rules.table:
        return LayerDecision(None, Verdict.left_float(Cause.NO_QAT_TYPE, _why_no_type(module, rules.table)))
    if "forward" in vars(module):
        return LayerDecision(None, PATCHED)
    decision = rules.decide(rules.of_module(module), module)
    return decision if decision.qconfig is None else LayerDecision(decision.qconfig, BY_REPLACEMENT)


def _why_no_type(module: nn.Module, table: QatModules) -> str:
    kind = type(module)
    base = next((base for base in kind.__mro__ if base in table), None)
    if parametrize.is_parametrized(module):
        original, remedy = kind.__mro__[1].__name__, "torch.nn.utils.parametrize.remove_parametrizations"
        return f"a parametrized {original}; call {remedy} first"
    if base is not None:
        return f"{kind.__name__} is a subclass of {base.__name__}; its forward may differ: pass its QAT type in custom"
    if kind.__name__ in STUBS:
        return "it returns its input unchanged; each layer quantizes its own input"
    if kind.__name__ == FLOAT_FUNCTIONAL:
        return 'it has no forward with inputs to quantize; use qtoolkit.nn.Add, Mul or Cat, or quantize="outputs"'
    if is_batch_norm(module):
        return "no chain of qtoolkit.fuse_modules names the layer before it"
    return f"no QAT type for {kind.__name__}"


def names_ignored(model: nn.Module, ignore: Ignore | None) -> list[str]:
    """Return the names of the modules that `ignore` leaves in float with all that is in them.

    Raises ValueError for a name or pattern that matches no module, TypeError for an entry that is no string.
    """
    modules = modules_by_name(model)
    if ignore is None:
        return []
    if callable(ignore) and not isinstance(ignore, type):
        return [name for name, module in modules.items() if ignore(name, module)]
    names: list[str] = []
    for entry in entries_of(ignore, "replace"):
        found = [name for name in modules if name == entry or fnmatchcase(name, entry)]
        if not found:
            raise ValueError("replace: ignore: " + unknown("module", entry, filter(None, modules)))
        names += found
    return names


def entries_of(ignore: object, what: str) -> list[str]:
    """Return the strings of an `ignore` argument of the public function `what`; TypeError for an entry that is none."""
    entries = list(ignore) if isinstance(ignore, Iterable) and not isinstance(ignore, str) else [ignore]
    names = [entry for entry in entries if isinstance(entry, str)]
    if names != entries:
        other = next(entry for entry in entries if not isinstance(entry, str))
        raise TypeError(
            f"{what}: ignore must be a name, a list of names, or a callable(name, module), got {shown(other)} in it; name "
            f"types in exclude."
        )
    return names


def decide_all(model: nn.Module, rules: LayerRules) -> dict[str, LayerDecision]:
    """Return how each layer is quantized, by its first name, in order; layers that are already replaced keep their verdict."""
    before = verdicts_in(model)
    decisions: dict[str, LayerDecision] = {}
    pairs, seen = [("", model)], set()
    while pairs:
        name, module = pairs.pop(0)
        if module in seen or isinstance(module, Quantizer | QuantizedGraphModule):
            continue
        seen.add(module)
        known = before.get(name)
        if known is not None and known.status is not Status.FLOAT:
            decisions[name] = LayerDecision(None, known)
        elif isinstance(module, QuantModule):
            decisions[name] = LayerDecision(None, BY_REPLACEMENT)
        elif _is_layer(name, module, rules.table):
            decisions[name] = decide_layer(module, rules)
        if name not in decisions or _has_layers_inside(module, decisions[name]):
            pairs[:0] = [(f"{name}.{child}".strip("."), part) for child, part in module.named_children()]
    return decisions


def record_plan(model: nn.Module, rules: LayerRules, verdicts: Mapping[str, Verdict]) -> None:
    """Store on a model the decisions about its layers, by their names in it, and by which rules."""
    now = modules_by_name(model)
    kinds = {name: str(kind_of_module(now[name])) for name in verdicts if name in now}
    mapping = None if rules.mapping is None else rules.mapping.copy()
    plan = Plan(rules.backend, kinds=kinds, inside=verdicts, mapping=mapping)
    set_record(model, replace(record_of(model), plan=plan))
    store_weights_as(rules.backend.weight_codes, model)


def quantized_otherwise(model: nn.Module, rules: LayerRules) -> list[str]:
    """Return the names of the layers that are already quantized by another config than these rules give.

    A second call without rules, for the same backend, keeps what the layers have.
    """
    before: dict[nn.Module, LayerRules] = {}
    for part, plan in plans_in(model):  # inner parts come later, and have their layers' own rules
        earlier = LayerRules.of(model.get_submodule(part), plan.backend, plan.mapping, rules.table, rules.custom)
        before |= dict.fromkeys(earlier.names, earlier)
    layers = {module: names for module, names in rules.names.items() if isinstance(module, QuantModule)}
    return [names[0] for module, names in layers.items() if _is_asked_otherwise(module, rules, before.get(module))]


def _is_asked_otherwise(layer: QuantModule, rules: LayerRules, before: LayerRules | None) -> bool:
    """Return whether rules ask for another config of a layer than the earlier rules; the user may have built it without any."""
    kind = float_type(layer)
    new = rules.find(rules.names[layer], kind)
    if before is None:
        return new.source != "default" and _quantizes_otherwise(layer, new.qconfig)
    is_asked = new.source != "default" or rules.backend != before.backend
    return is_asked and new.qconfig != before.find(before.names[layer], kind).qconfig


def _quantizes_otherwise(layer: QuantModule, qconfig: QConfig | None) -> bool:
    """Return whether a quantizer of a layer's own has another spec than a config asks for; the layer chooses the axis."""
    asked = {} if qconfig is None else {"weight_quantizer": qconfig.weight, "input_quantizer": qconfig.activation}
    own = ((name, layer._modules.get(name)) for name in ("weight_quantizer", "input_quantizer"))
    return any(
        isinstance(quantizer, Quantizer) and _without_axis(quantizer.spec) != _without_axis(asked.get(name))
        for name, quantizer in own
    )


def _without_axis(spec: QuantSpec | None) -> QuantSpec | None:
    return None if spec is None else replace(spec, axis=None)


def _is_layer(name: str, module: nn.Module, table: QatModules) -> bool:
    is_leaf = bool(name) and not any(True for _ in module.children())
    is_known = any(base in table for base in type(module).__mro__) or type(module).__name__ == FLOAT_FUNCTIONAL
    return is_known or is_leaf


def _has_layers_inside(module: nn.Module, decision: LayerDecision) -> bool:
    is_opaque = type(module).__name__ == FLOAT_FUNCTIONAL or parametrize.is_parametrized(module)
    return decision.verdict.status is Status.FLOAT and not is_opaque
