"""Which layers module replacement quantizes, and how, by the backend, the mapping and `ignore`; why others stay in float."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qtoolkit.backends import Backend
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.eager.record import statuses_in
from qtoolkit.errors import unknown
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.swap import QatModules, weight_spec_by_rule
from qtoolkit.graph.plan import Status
from qtoolkit.nn import QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.module import Quantizer
from qtoolkit.op_kinds.nodes import OTHER, WEIGHTED_KINDS
from qtoolkit.op_kinds.table import MOVES
from qtoolkit.shared_modules import modules_by_name

Ignore = str | Iterable[str] | Callable[[str, nn.Module], bool]

QUANTIZED_ROLES = ("compute", "merge", "concat")
# Kinds of layers with weights. Other layers have nothing to quantize if activations stay in float.
HAVE_WEIGHTS = (*WEIGHTED_KINDS, "embedding", "attention", "recurrent", OTHER)
# Modules of torch.ao's eager mode, by name, because torch.ao may be absent.
STUBS = ("QuantStub", "DeQuantStub")
FLOAT_FUNCTIONAL = "FloatFunctional"
BY_REPLACEMENT = "by module replacement"


@dataclass(frozen=True)
class Decision:
    """The decision about a layer.

    Attributes:
        qconfig: Its config, with the weight's own axis; None leaves the layer as it is.
        reason: The reason, for people.
        status: The layer's status after the replacement.
    """

    qconfig: QConfig | None
    reason: str
    status: Status = "float"


@dataclass(frozen=True)
class ModuleRules:
    """How the layers of a model are quantized.

    Attributes:
        backend: The target.
        table: Float type -> QAT type.
        mapping: The user's rules.
        custom: The float types that the user added to the table.
        ignored: Modules that stay in float, with the reason.
        names: All dotted names of each module.
    """

    backend: Backend
    table: QatModules
    mapping: QConfigMapping | None = None
    custom: frozenset[type[nn.Module]] = frozenset()
    ignored: Mapping[nn.Module, str] = field(default_factory=dict)
    names: Mapping[nn.Module, list[str]] = field(default_factory=dict)

    def decide(self, module: nn.Module) -> Decision:
        """Return the decision about a float layer.

        Raises:
            ValueError: The layer has several names, and the mapping has different configs for them.
        """
        if module in self.ignored:
            return Decision(None, f"float: {self.ignored[module]}")
        qat_type = self.table.get(type(module))
        if qat_type is None:
            return Decision(None, f"float: {self._why_no_type(module)}")
        if "forward" in vars(module):
            return Decision(None, "float: its forward is an attribute of this one module; define it in a class")
        qconfig, own = self._rule(module)
        return self._decide(qconfig, own, type(module), getattr(qat_type, "KIND", OTHER))

    def output_spec(self, module: nn.Module) -> QuantSpec | None:
        """Return the spec of the output of a module whose type is not in the table; None leaves it in float."""
        qconfig = None if module in self.ignored else self._rule(module)[0]
        return None if qconfig is None else qconfig.activation

    def reason_apart(self, batch_norm: nn.Module) -> str | None:
        """Return why a batch norm is not linked to the layer before it; None if it is."""
        if batch_norm in self.ignored:
            return f"float: {self.ignored[batch_norm]}"
        return "float: the qconfig_mapping says so" if self._rule(batch_norm)[0] is None else None

    def _decide(self, qconfig: QConfig | None, own: bool, kind_of_type: type[nn.Module], kind: str) -> Decision:
        if qconfig is None:
            return Decision(None, "float: the qconfig_mapping says so")
        role = self.backend.roles.get(kind, "float")
        computed = role in QUANTIZED_ROLES
        if not (own or computed or kind == "recurrent" or kind_of_type in self.custom):
            how = "only moves values" if kind in MOVES else f"{self.backend.name} computes in float"
            return Decision(None, f"float: a {kind}, which {how}")
        weight = weight_spec_by_rule(qconfig, own, kind, self.backend) if computed else qconfig.weight
        if weight is None and (qconfig.activation is None or kind == "embedding"):
            return Decision(None, "float: the qconfig_mapping says so")
        if qconfig.activation is None and kind not in HAVE_WEIGHTS:
            return Decision(None, f"float: the config quantizes no activations, and a {kind} has no weights")
        return Decision(QConfig(qconfig.activation, weight), BY_REPLACEMENT, "quantized")

    def _rule(self, module: nn.Module) -> tuple[QConfig | None, bool]:
        """Return the config that holds for a module, and whether a rule for this very module, or its type, gave it."""
        found = [self._match(name, module) for name in self.names.get(module, [""])]
        first = min(rank for rank, _ in found)
        configs = [qconfig for rank, qconfig in found if rank == first]
        if any(qconfig != configs[0] for qconfig in configs):
            names = ", ".join(repr(name) for name in self.names[module])
            raise ValueError(
                f"replace: the module with the names {names} is one, and the qconfig_mapping has different configs for them; "
                f"give it one rule, or the same config."
            )
        return configs[0], first < RANK_OF_CONTAINER

    def _match(self, name: str, module: nn.Module) -> tuple[int, QConfig | None]:
        """Return the config for a module of this name, and its rule's rank: the lower, the more exact."""
        if self.mapping is None:
            return RANK_OF_DEFAULT, self.backend.qconfig
        own = self.mapping.match(name, type(module))
        if own is not None and own.source != "global":
            return self.mapping.SOURCES.index(own.source), own.qconfig
        for outer, container in self._containers(name):
            match = self.mapping.match(outer, container)
            if match is not None and match.source != "global":
                return RANK_OF_CONTAINER, match.qconfig
        return (RANK_OF_DEFAULT, self.backend.qconfig) if own is None else (RANK_OF_DEFAULT - 1, own.qconfig)

    def _containers(self, name: str) -> Iterator[tuple[str, type[nn.Module]]]:
        """Return the names and types of the modules around one, the nearest first."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._types:
                yield name, self._types[name]

    @cached_property
    def _types(self) -> dict[str, type[nn.Module]]:
        return {name: type(module) for module, names in self.names.items() for name in names}

    def _why_no_type(self, module: nn.Module) -> str:
        kind = type(module)
        base = next((base for base in kind.__mro__ if base in self.table), None)
        if parametrize.is_parametrized(module):
            original, remedy = kind.__mro__[1].__name__, "torch.nn.utils.parametrize.remove_parametrizations"
            return f"a parametrized {original}; call {remedy} first"
        if base is not None:
            return (
                f"{kind.__name__} is a subclass of {base.__name__}; its forward may differ: pass its QAT type in custom"
            )
        if kind.__name__ in STUBS:
            return "an identity stub"
        if kind.__name__ == FLOAT_FUNCTIONAL:
            return 'it has no forward with inputs to quantize; use qtoolkit.nn.Add, Mul or Cat, or quantize="outputs"'
        if is_batch_norm(module):
            return "no chain of qtoolkit.fuse_modules names the layer before it"
        return f"no QAT type for {kind.__name__}"


RANK_OF_CONTAINER = len(QConfigMapping.SOURCES) - 1  # after the rules for the module itself, before the global one
RANK_OF_DEFAULT = RANK_OF_CONTAINER + 2


def ignored_in(model: nn.Module, ignore: Ignore | None) -> dict[nn.Module, str]:
    """Return the modules that `ignore` leaves in float, and their submodules, each with the reason.

    Raises:
        ValueError: A name or pattern matches no module.
        TypeError: An entry is not a string.
    """
    if ignore is None:
        return {}
    if callable(ignore) and not isinstance(ignore, type):
        hits = [module for name, module in modules_by_name(model).items() if ignore(name, module)]
        return _with_parts(hits, "ignored by the callable")
    reasons: dict[nn.Module, str] = {}
    for entry in entries_of(ignore, "replace"):
        reasons = {**_with_parts(_matches(model, entry), f"ignored by {entry!r}"), **reasons}
    return reasons


def entries_of(ignore: object, what: str) -> list[str]:
    """Return the strings of an `ignore` argument of the public function `what`.

    Raises:
        TypeError: An entry is not a string.
    """
    several = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    entries: list[Any] = list(ignore) if several else [ignore]  # type: ignore[call-overload]  # an Iterable
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(
                f"{what}: ignore must be a name, a list of names, or a callable(name, module), got {entry!r} in it."
            )
    return entries


def _matches(model: nn.Module, entry: str) -> list[nn.Module]:
    modules = modules_by_name(model)
    found = [module for name, module in modules.items() if name == entry or fnmatchcase(name, entry)]
    if not found:
        raise ValueError("replace: ignore: " + unknown("module", entry, filter(None, modules)))
    return found


def _with_parts(modules: Iterable[nn.Module], reason: str) -> dict[nn.Module, str]:
    return {part: reason for module in modules for part in module.modules()}


def decide_all(model: nn.Module, rules: ModuleRules) -> dict[str, Decision]:
    """Return the decision about each layer of a model, by its first name, in order.

    Layers that an earlier replacement quantized keep their status.
    """
    before = statuses_in(model)
    decisions: dict[str, Decision] = {}
    pairs, seen = [("", model)], set()
    while pairs:
        name, module = pairs.pop(0)
        if module in seen or isinstance(module, Quantizer | QuantizedGraphModule):
            continue
        seen.add(module)
        status, reason = before.get(name, ("float", ""))
        if status != "float":
            decisions[name] = Decision(None, reason, status)
        elif isinstance(module, QuantModule):
            decisions[name] = Decision(None, BY_REPLACEMENT, "quantized")
        elif _is_layer(name, module, rules.table):
            decisions[name] = rules.decide(module)
        if name not in decisions or _has_layers_inside(module, decisions[name]):
            pairs[:0] = [(f"{name}.{child}".strip("."), part) for child, part in module.named_children()]
    return decisions


def _is_layer(name: str, module: nn.Module, table: QatModules) -> bool:
    is_leaf = bool(name) and not any(True for _ in module.children())
    is_known = any(base in table for base in type(module).__mro__) or type(module).__name__ == FLOAT_FUNCTIONAL
    return is_known or is_leaf


def _has_layers_inside(module: nn.Module, decision: Decision) -> bool:
    is_opaque = type(module).__name__ == FLOAT_FUNCTIONAL or parametrize.is_parametrized(module)
    return decision.status == "float" and not is_opaque
