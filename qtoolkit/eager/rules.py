"""Which layers module replacement quantizes, how, and why others stay float."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qtoolkit.config import QuantSpec
from qtoolkit.errors import unknown
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.plan import BY_CONFIG, Cause, Plan, Status, Verdict
from qtoolkit.layer_rules import LayerDecision, LayerRules
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.registry import QatModules
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.shared_modules import modules_by_name

Ignore = str | Iterable[str] | Callable[[str, nn.Module], bool]

PLAN = "_qtoolkit_plan"  # the attribute of a replaced model that holds what was decided
# torch.ao's modules that eager quantization knows, by name: torch.ao may be gone.
STUBS = ("QuantStub", "DeQuantStub")
FLOAT_FUNCTIONAL = "FloatFunctional"
BY_REPLACEMENT = Verdict.quantized(Cause.REPLACED, "by module replacement")
PATCHED = Verdict.left_float(
    Cause.NO_QAT_TYPE, "its forward was replaced on this one module; make it a method of the class"
)


@dataclass(frozen=True)
class ReplacementRules:
    """How the layers of a model are quantized by module replacement.

    Attributes:
        rules: The configs.
        ignored: Modules that stay float, with the reason.
    """

    rules: LayerRules
    ignored: Mapping[nn.Module, str] = field(default_factory=dict)

    def decide(self, module: nn.Module) -> LayerDecision:
        """Return how a float layer is quantized.

        Raises:
            ValueError: The layer has several names, for which the mapping has different configs.
        """
        if module in self.ignored:
            return LayerDecision(None, self._ignores(module))
        if type(module) not in self.rules.table:
            return LayerDecision(None, Verdict.left_float(Cause.NO_QAT_TYPE, self._why_no_type(module)))
        if "forward" in vars(module):
            return LayerDecision(None, PATCHED)
        decision = self.rules.decide(self.rules.of_module(module), type(module))
        return decision if decision.qconfig is None else LayerDecision(decision.qconfig, BY_REPLACEMENT)

    def output_spec(self, module: nn.Module) -> QuantSpec | None:
        """Return the spec of the output of a module that is no layer of the table; None leaves it in float."""
        qconfig = None if module in self.ignored else self.rules.of_module(module).qconfig
        return None if qconfig is None else qconfig.activation

    def verdict_apart(self, batch_norm: nn.Module) -> Verdict | None:
        """Return the verdict on a batch norm that the layer before it must not take over; None on others."""
        if batch_norm in self.ignored:
            return self._ignores(batch_norm)
        return BY_CONFIG if self.rules.of_module(batch_norm).qconfig is None else None

    def _ignores(self, module: nn.Module) -> Verdict:
        return Verdict.left_float(Cause.IGNORED, self.ignored[module])

    def _why_no_type(self, module: nn.Module) -> str:
        kind = type(module)
        base = next((base for base in kind.__mro__ if base in self.rules.table), None)
        if parametrize.is_parametrized(module):
            return (
                f"a subclass (parametrized) of {kind.__mro__[1].__name__}; call "
                f"torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if base is not None:
            return f"{kind.__name__} is a subclass of {base.__name__}, which may compute anything; name its QAT type in custom"
        if kind.__name__ in STUBS:
            return "an identity stub"
        if kind.__name__ == FLOAT_FUNCTIONAL:
            return 'it has results and no inputs of its own; take qtoolkit.nn.Add, Mul or Cat, or quantize="outputs"'
        if is_batch_norm(module):
            return "no chain of qtoolkit.fuse_modules says which layer it follows"
        return f"no QAT type for {kind.__name__}"


def ignored_in(model: nn.Module, ignore: Ignore | None) -> dict[nn.Module, str]:
    """Return the modules that replacement leaves alone, with what they are in, and the reason.

    Raises:
        ValueError: A name or pattern fits no module.
        TypeError: An entry is no string.
    """
    if ignore is None:
        return {}
    if callable(ignore) and not isinstance(ignore, type):
        hits = [module for name, module in modules_by_name(model).items() if ignore(name, module)]
        return _with_parts(hits, "ignored by the callable")
    reasons: dict[nn.Module, str] = {}
    for entry in entries_of(ignore, "replace"):
        hits = _hits(model, entry)
        reasons = {**_with_parts(hits, f"ignored by {entry!r}"), **reasons}
    return reasons


def entries_of(ignore: object, what: str) -> list[str]:
    """Return the strings of an `ignore` argument.

    Raises:
        TypeError: It is something else.
    """
    several = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    entries: list[Any] = list(ignore) if several else [ignore]  # type: ignore[call-overload]  # an Iterable
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(
                f"{what}: ignore must be a name, a list of names, or a callable(name, module), got {entry!r} in it."
            )
    return entries


def _hits(model: nn.Module, entry: str) -> list[nn.Module]:
    modules = modules_by_name(model)
    hits = [module for name, module in modules.items() if name == entry or fnmatchcase(name, entry)]
    if not hits:
        raise ValueError("replace: ignore: " + unknown("module", entry, filter(None, modules)))
    return hits


def _with_parts(modules: Iterable[nn.Module], reason: str) -> dict[nn.Module, str]:
    return {part: reason for module in modules for part in module.modules()}


def decide_all(
    model: nn.Module, rules: ReplacementRules, before: Mapping[str, Verdict] | None = None
) -> dict[str, LayerDecision]:
    """Return how each layer of a model is quantized, by its first name, in order.

    Args:
        model: The model.
        rules: How its layers are quantized.
        before: The verdicts of earlier replacements. They hold for layers that are not in float.
    """
    decisions: dict[str, LayerDecision] = {}
    pairs, seen = [("", model)], set()
    while pairs:
        name, module = pairs.pop(0)
        if module in seen or isinstance(module, Quantizer | QuantizedGraphModule):
            continue
        seen.add(module)
        children = [(f"{name}.{child}".strip("."), part) for child, part in module.named_children()]
        known = (before or {}).get(name)
        if known is not None and known.status is not Status.FLOAT:
            decisions[name] = LayerDecision(None, known)
        elif isinstance(module, QuantModule):
            decisions[name] = LayerDecision(None, BY_REPLACEMENT)
        elif _is_layer(name, module, rules.rules.table):
            decisions[name] = rules.decide(module)
        if name not in decisions or _goes_on_inside(module, decisions[name]):
            pairs[:0] = children
    return decisions


def _is_layer(name: str, module: nn.Module, table: QatModules) -> bool:
    is_leaf = bool(name) and not any(True for _ in module.children())
    is_known = any(base in table for base in type(module).__mro__) or type(module).__name__ == FLOAT_FUNCTIONAL
    return is_known or is_leaf


def _goes_on_inside(module: nn.Module, decision: LayerDecision) -> bool:
    is_one = type(module).__name__ == FLOAT_FUNCTIONAL or parametrize.is_parametrized(module)
    return decision.verdict.status is Status.FLOAT and not is_one


def verdicts_in(model: nn.Module) -> dict[str, Verdict]:
    """Return the verdicts of earlier replacements of a model, or of parts of it, by dotted names in the model."""
    verdicts: dict[str, Verdict] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        plan = vars(module).get(PLAN)
        if isinstance(plan, Plan):
            verdicts |= {f"{name}.{layer}".strip("."): verdict for layer, verdict in plan.inside.items()}
    return verdicts
