"""The one resolver of configs: from a backend, a QConfigMapping and names to the config of a layer or an op."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from torch import nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.config.kinds import Kind
from qtoolkit.config.mapping import Source, is_same_rule
from qtoolkit.errors import warn, with_article, within
from qtoolkit.nn.registry import QatModules
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.shared_modules import modules_by_name, names_by_module
from qtoolkit.verdicts import BY_CONFIG, Cause, Verdict

EMPTY = Verdict.left_float(Cause.NO_ELEMENTS, "its weight has no elements")
COMPLEX = Verdict.left_float(Cause.COMPLEX, "its weight is complex")


def _without_range(module: nn.Module) -> Verdict | None:
    """Return why the weight of a module has no range; None if it has one, or if there is no weight."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or (weight.numel() and not weight.is_complex()):
        return None
    return COMPLEX if weight.numel() else EMPTY


@dataclass(frozen=True)
class Rule:
    """The config that holds for a layer or an op."""

    qconfig: QConfig | None  # None leaves it in float
    source: Source | Literal["default"] = "default"  # the kind of rule, or the backend's default
    depth: int = 0  # 0 for a rule for the layer or op itself, more for a module around it
    left: Verdict = BY_CONFIG  # what the report says where the config is None
    says_axis: bool = False  # whether its weight's spec names an axis of the weight itself

    @property
    def is_general(self) -> bool:
        """Whether it is a global rule or the backend's default."""
        return self.source in ("global", "default")

    @property
    def is_explicit(self) -> bool:
        """Whether it names the layer or op itself, by name, regex or type. Then it holds against the backend's table."""
        return not self.is_general and self.depth == 0


@dataclass(frozen=True)
class LayerDecision:
    """How a layer is quantized: the config, with the axis that the weight itself has, and what the report says of it."""

    qconfig: QConfig | None
    verdict: Verdict


@dataclass(frozen=True)
class LayerRules:
    """Which config holds for each layer and op of a model.

    The first rule in this order applies: an exclusion, by name, by regular expression, by type, global, the backend default. A
    rule by name, regular expression or type for a module applies to all layers and ops in it. The nearest module comes first,
    and the layer or op itself comes before the modules around it. A module with several names takes the most exact of their
    rules. Fields that a rule's spec leaves out have the backend's values.
    """

    backend: Backend
    mapping: QConfigMapping | None = None  # the user's rules
    table: QatModules = field(default_factory=dict)  # float type -> QAT type
    # the float types that the user added to the table: quantized even if the backend's table leaves their kind in float
    custom: frozenset[type[nn.Module]] = frozenset()
    names: Mapping[nn.Module, Sequence[str]] = field(
        default_factory=dict
    )  # all names of each module of the float model
    types: Mapping[str, type[nn.Module]] = field(default_factory=dict)  # the type of each, by name
    without_range: Mapping[str, Verdict] = field(default_factory=dict)  # why some stay in float, by name

    @classmethod
    def of(
        cls,
        model: nn.Module,
        backend: Backend,
        mapping: QConfigMapping | None,
        table: QatModules,
        custom: Iterable[type[nn.Module]],
    ) -> Self:
        """Return the rules for a float model, whose module names and types they read now."""
        modules = modules_by_name(model)
        types = {name: type(module) for name, module in modules.items()}
        without_range = {name: why for name, module in modules.items() if (why := _without_range(module)) is not None}
        return cls(backend, mapping, table, frozenset(custom), names_by_module(model), types, without_range)

    def check_names(self, ops: Iterable[str] = ()) -> None:
        """Raise ValueError for a rule by name or regular expression that is for no module of the model, and for no op of these.

        Containers are modules too. A model that is a layer itself has the name "".
        """
        if self.mapping is not None:
            modules = [name for name, kind in self.types.items() if name or kind in self.table]
            self.mapping.check_names([*modules, *ops])

    def of_module(self, module: nn.Module) -> Rule:
        """Return the rule for a module of the float model, or for one without a name; as `find`."""
        return self.find(self.names.get(module, ("",)), type(module))

    def decide(self, rule: Rule, layer: nn.Module) -> LayerDecision:
        """Return how a layer, whose type is in the table, is quantized, by the rule that holds for it."""
        if rule.qconfig is None:
            return LayerDecision(None, rule.left)
        float_type = type(layer)
        kind, output_axis = kind_of_type(self.table[float_type]), getattr(self.table[float_type], "OUTPUT_AXIS", 0)
        activation = rule.qconfig.activation
        if not (rule.is_explicit or float_type in self.custom or self._computes(kind)):
            how = "only moves values" if kind.moves else f"{self.backend.name} computes in float"
            return LayerDecision(None, Verdict.left_float(Cause.TARGET, f"{with_article(kind)}, which {how}"))
        grouped = kind.transposed and getattr(layer, "groups", 1) > 1 and not rule.is_explicit
        if grouped and not self.backend.grouped_conv_transpose:
            why = f"{with_article(kind)} with groups, for which {self.backend.name} has no integer kernel"
            return LayerDecision(None, Verdict.left_float(Cause.TARGET, why))
        weight = self.weight_spec(rule, kind, output_axis)
        if weight is None and (activation is None or kind.takes_indices):
            return LayerDecision(None, BY_CONFIG)
        if activation is None and not kind.has_weight:
            why = f"the config quantizes no activations, and {with_article(kind)} has no weights"
            return LayerDecision(None, Verdict.left_float(Cause.CONFIG, why))
        return LayerDecision(QConfig(activation, weight), Verdict.quantized())

    def weight_spec(self, rule: Rule, kind: OpKind, output_axis: int = 0) -> QuantSpec | None:
        """Return the spec of the weight of a layer, with the axis that the weight itself has.

        Axis 0 of the backend's default, of a global rule or of a rule for a module around the layer stands for the output
        channel, and (with a group_size) axis 1 for the input channel. An axis that is written in an explicit rule is an axis of
        the weight itself; one that the target does not take gives a warning.
        """
        spec = None if rule.qconfig is None else rule.qconfig.weight
        if spec is None or not (kind.transposed or output_axis):
            return spec
        if rule.says_axis:
            if kind.transposed:
                self._check_axis(spec)
            return spec
        # The weight of a transposed convolution is (in, out / groups, k...), of transformers' Conv1D (in, out).
        if spec.group_size is None:
            axis = self.backend.conv_transpose_axis if kind.transposed else output_axis
            return replace(spec, axis=axis) if spec.axis == 0 else spec
        return replace(spec, axis=1 - spec.axis) if spec.axis in (0, 1) else spec

    def _check_axis(self, spec: QuantSpec) -> None:
        wanted, channel = self.backend.conv_transpose_axis, ("input", "output")
        if spec.group_size is None and spec.axis == 1 - wanted:  # the other axis than the target takes
            warn(
                f"qconfig_mapping: a rule by name, regular expression or type says the axis of the weight itself, and axis="
                f"{spec.axis} of a transposed convolution's weight (in, out / groups, k...) is the {channel[1 - wanted]} "
                f"channel; {self.backend.name} takes a scale for each {channel[wanted]} channel: axis={wanted}. (In a "
                f"global rule axis=0 stands for the output channel of every layer.)",
            )

    def _computes(self, kind: OpKind) -> bool:
        # Recurrent layers have no op in a backend's table: their matrix products do.
        return self.backend.quantizes(kind) or kind.keeps_state

    # ---- matching

    def names_of(self, name: str) -> Sequence[str]:
        """Return all names of the module of a name."""
        named = self.names.values() if self.mapping is not None else ()
        return next((names for names in named if name in names), (name,))

    def find(self, names: Sequence[str], object_type: Kind, scope: str | None = None) -> Rule:
        """Return the rule for all names of a module, or for an op's name; ValueError if the names differ in rules.

        `object_type` is the module's float type, or the function or method, and `scope` the dotted name of the module whose
        forward calls an op; None for a module, whose name contains it.
        """
        without_range = [self.without_range[name] for name in names if name in self.without_range]
        if without_range:
            return Rule(None, left=without_range[0])
        if self.mapping is None:
            return Rule(self.backend.qconfig)
        matches = [
            self.mapping.match(name, self._type_named(name, object_type), self._around(name, scope)) for name in names
        ]
        found = [match for match in matches if match is not None]
        if not found:
            return Rule(self.backend.qconfig)
        best = min(found, key=lambda match: match.rank)
        if any(match.rank == best.rank and not is_same_rule(match.qconfig, best.qconfig) for match in found):
            raise ValueError(
                f"qconfig_mapping: {', '.join(map(repr, names))} are names of one module, and the mapping has different "
                f"configs for them; give them the same config."
            )
        left = Verdict.left_float(Cause.IGNORED, f"excluded by {best.excluded_by}") if best.excluded_by else BY_CONFIG
        rule = Rule(self.completed(best.qconfig), best.source, best.depth, left)
        weight = None if best.qconfig is None else best.qconfig.weight
        says_axis = rule.is_explicit and weight is not None and "axis" in weight.to_dict()
        return replace(rule, says_axis=says_axis)

    def completed(self, qconfig: QConfig | None) -> QConfig | None:
        """Return a config of the user's with the backend's values in the fields that its specs leave out.

        Raises ValueError for written fields that do not fit them.
        """
        if qconfig is None:
            return None
        with within(f"qconfig_mapping, with what it leaves to {self.backend.name}"):
            return qconfig.completed(self.backend.qconfig)

    def _type_named(self, name: str, object_type: Kind) -> Kind:
        """Return the type by which the mapping finds a module: the float model's, where a rule is for it, else `object_type`.

        They differ for a subclass of torch's layer, which capture replaces by torch's layer where both compute the same.
        """
        own = self.types.get(name)
        if own is None or self.mapping is None or not self.mapping.has_type(own):
            return object_type
        return own if isinstance(object_type, type) and issubclass(own, object_type) else object_type

    def _around(self, name: str, scope: str | None) -> Iterator[tuple[str, type[nn.Module]]]:
        """Yield the names and types of the modules around a module of this name, or around an op in this scope."""
        outer = name.rpartition(".")[0] if scope is None else scope
        while name and outer != name:
            if outer in self.types:
                yield outer, self.types[outer]
            name, outer = outer, outer.rpartition(".")[0]
