"""QConfig and QConfigMapping: which layers are quantized, and how."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from torch import nn

from qtoolkit.config.formats import BLOCKS, FloatType
from qtoolkit.config.kinds import Kind, kind_at, path_of
from qtoolkit.config.spec import QuantSpec
from qtoolkit.errors import check_known, check_mapping, check_sequence, shown, type_beside, unknown, warn, within


@dataclass(frozen=True)
class QConfig:
    """How a layer is quantized: its input activations and its weight. None, the default, leaves them in float.

    Raises:
        ValueError: The activation's spec has a group_size.
        TypeError: A value is no QuantSpec.

    Example:
        >>> QConfig(activation=QuantSpec(), weight=QuantSpec(axis=0)).describe()
        'activation int8, weight int8 per-channel(0)'
        >>> QConfig(weight=QuantSpec(bits=4, axis=0)).describe()  # weights alone
        'activation float, weight int4 per-channel(0)'
    """

    activation: QuantSpec | None = None
    weight: QuantSpec | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, QuantSpec | None):
                raise TypeError(
                    f"QConfig: {name} must be a QuantSpec or None, which leaves it in float, got {shown(value)}; write "
                    f"{name}=qtoolkit.QuantSpec(bits=8)."
                )
        spec = self.activation
        if spec is not None and spec.group_size is not None and spec.format not in BLOCKS:
            raise ValueError(
                f"QConfig: group_size is for weights, got activation group_size={spec.group_size}: its scales would depend "
                f"on the batch size; set it to None for activations, or take dynamic=True or a format of blocks, 'mxfp8'."
            )

    def describe(self) -> str:
        """Return a short name for reports."""
        parts = {"activation": self.activation, "weight": self.weight}
        return ", ".join(f"{name} {'float' if spec is None else spec.describe()}" for name, spec in parts.items())

    def completed(self, base: "QConfig") -> "QConfig":
        """Return the config with specs completed by another one's (`QuantSpec.completed`); without one, by the defaults.

        Raises:
            ValueError: A field that is written in a spec does not fit the other spec.
        """
        specs: dict[str, QuantSpec | None] = {}
        for name, spec in vars(self).items():
            with within(name):
                specs[name] = spec and spec.completed(getattr(base, name) or QuantSpec())
        return QConfig(**specs)

    def with_scale_dtype(self, scale_dtype: FloatType) -> "QConfig":
        """Return the config with scales of this type, except for specs that need another one."""
        return QConfig(**{name: spec and spec.with_scale_dtype(scale_dtype) for name, spec in vars(self).items()})

    def to_dict(self) -> dict[str, object]:
        """Return the specs, with the fields that are written, as values that JSON can represent."""
        return {name: spec and spec.to_dict() for name, spec in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from `to_dict`'s result.

        Raises:
            ValueError: A key or a value is unknown.
        """
        check_mapping("QConfig", values)
        specs: dict[str, QuantSpec | None] = dict.fromkeys(("activation", "weight"))
        for name, spec in values.items():
            check_known("key of QConfig", name, specs)
            with within(name):
                specs[name] = None if spec is None else QuantSpec.from_dict(spec)
        return cls(**specs)


def is_same_rule(one: QConfig | None, other: QConfig | None) -> bool:
    """Return whether two configs write the same values; equal configs may leave different fields to the backend."""
    return (one and one.to_dict()) == (other and other.to_dict())


Source = Literal["module_name", "module_name_regex", "object_type", "global"]
Exclude = str | Kind | Iterable[str | Kind]
PLAIN_NAME = re.compile(r"[\w.]*")  # any other text of `exclude` is a regular expression


@dataclass(frozen=True)
class Match:
    """The config that holds for a layer, and the rule that gave it.

    Attributes:
        qconfig: The config; None leaves the layer in float.
        source: The kind of rule.
        depth: 0 for a rule for the layer itself, 1 for the nearest module around it, and so on.
        excluded_by: The name, the regular expression or the type by which the layer is excluded, as text; "" if it is not.
    """

    qconfig: QConfig | None
    source: Source
    depth: int = 0
    excluded_by: str = field(default="", repr=False)

    @property
    def rank(self) -> tuple[int, int]:
        """How exact the rule is: the less, the more exact."""
        return -1 if self.excluded_by else QConfigMapping.SOURCES.index(self.source), self.depth


class QConfigMapping:
    """Which layers get which config: by exact name, then by regex, then by type, then by the global rule.

    A rule for a module, by name, regex or type, holds for all layers inside the module. Of several rules of one kind,
    the rule for the innermost module around the layer holds; a rule for the layer itself comes before all of them.

    Fields that a spec of a config leaves out have the backend's values (`QuantSpec`). A config of None leaves the layer
    in float. A layer without a rule has the backend's default config. `exclude` takes precedence over all rules: its
    layers stay in float.

    Example:
        >>> w4 = QConfig(QuantSpec(bits=4), QuantSpec(bits=4, axis=0))
        >>> mapping = QConfigMapping().set_module_name_regex(r"layer[12]\\..*", w4).set_module_name("fc", None)
        >>> mapping.match("layer1.0.conv1", torch.nn.Conv2d).qconfig == w4
        True
        >>> mapping.match("fc", torch.nn.Linear)
        Match(qconfig=None, source='module_name', depth=0)
        >>> mapping.exclude(r"layer1\\..*", torch.nn.Linear).match("layer1.0.conv1", torch.nn.Conv2d).qconfig is None
        True
        >>> QConfigMapping.from_json(mapping.to_json()) == mapping
        True
    """

    SOURCES: tuple[Source, ...] = ("module_name", "module_name_regex", "object_type", "global")
    excluded: "QConfigMapping | None" = None  # rules with None, which come before all others

    def __init__(self) -> None:
        self.rules: dict[Source, dict[Any, QConfig | None]] = {source: {} for source in self.SOURCES}

    def set_global(self, qconfig: QConfig | None) -> Self:
        """Set the config of every layer without another rule."""
        return self._set("global", "", qconfig)

    def set_object_type(self, object_type: Kind, qconfig: QConfig | None) -> Self:
        """Set the config of a module type (torch.nn.Conv2d), a function (torch.add) or a tensor method (torch.Tensor.add)."""
        if not callable(object_type) or isinstance(object_type, nn.Module):
            raise TypeError(
                f"set_object_type: object_type must be a type or a function, got {shown(object_type)}"
                f"{_way_of_module(object_type)}."
            )
        if isinstance(object_type, type) and not issubclass(object_type, nn.Module):
            raise TypeError(
                f"set_object_type: a type must be a module type, such as torch.nn.Conv2d, got {object_type.__name__}."
            )
        return self._set("object_type", object_type, qconfig)

    def set_module_name_regex(self, regex: str, qconfig: QConfig | None) -> Self:
        """Set the config of the layers whose full dotted name matches a regular expression."""
        _check_text("set_module_name_regex", "regex", regex)
        try:
            re.compile(regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"set_module_name_regex: '{regex}' is not a regular expression: {error} ('.*' stands for any "
                f"characters)."
            ) from None
        return self._set("module_name_regex", regex, qconfig)

    def set_module_name(self, name: str, qconfig: QConfig | None) -> Self:
        """Set the config of the layer with this dotted name."""
        _check_text("set_module_name", "name", name)
        return self._set("module_name", name, qconfig)

    def exclude(self, *layers: str | Kind) -> Self:
        """Leave layers and ops in float, with all that is in them. These rules come before all others.

        Args:
            *layers: Dotted names of layers, or of modules around them; regular expressions for whole dotted names, told by
                characters that names do not have; types of modules; and functions. As for the other rules, a type stands for
                itself and not for its subclasses.

        Raises:
            TypeError: One of them is something else.
            ValueError: A text is neither a name nor a regular expression.
        """
        excluded = self.excluded or QConfigMapping()
        for layer in layers:
            if not isinstance(layer, str):
                if not callable(layer) or isinstance(layer, nn.Module):
                    raise TypeError(
                        f"exclude must contain names, regular expressions, module types and functions, got {shown(layer)}"
                        f"{_way_of_module(layer)}."
                    )
                excluded.set_object_type(layer, None)
            elif PLAIN_NAME.fullmatch(layer):
                excluded.set_module_name(layer, None)
            else:
                excluded.set_module_name_regex(layer, None)
        self.excluded = excluded
        return self

    def _set(self, source: Source, key: object, qconfig: QConfig | None) -> Self:
        if qconfig is not None and not isinstance(qconfig, QConfig):
            raise TypeError(f"QConfigMapping: a config must be a QConfig or None, got {type_beside(qconfig, QConfig)}.")
        self.rules[source][key] = qconfig
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, which for methods of torch.ao's class says what to write here."""
            way = ""
            if name == "set_module_name_object_type_order":
                way = (
                    "; a layer, or a function by the name of its node, is named by set_module_name or set_module_name_regex: "
                    "qtoolkit.quantization_report(prepared) lists the names"
                )
            raise AttributeError(f"QConfigMapping has no attribute {name!r}{way}.")

    def copy(self) -> "QConfigMapping":
        """Return a mapping with the same rules; changes to it leave this one unchanged."""
        new = QConfigMapping()
        new.rules = {source: dict(rules) for source, rules in self.rules.items()}
        new.excluded = None if self.excluded is None else self.excluded.copy()
        return new

    def match(
        self, name: str, object_type: Kind | None, around: Iterable[tuple[str, Kind | None]] = ()
    ) -> Match | None:
        """Return the config that holds for a layer, by precedence; None where no rule does.

        Args:
            name: The layer's dotted name.
            object_type: Its type.
            around: Names and types of the modules around it, the nearest first. A rule for one of them by name, regex or type
                holds for the layer, unless a nearer one has a rule of the same kind.
        """
        path = [(name, object_type), *around]
        excluded = None if self.excluded is None else self.excluded._find(path)
        if excluded is not None:
            found, key = excluded
            return replace(found, excluded_by=getattr(key, "__name__", repr(key)))
        named = self._find(path)
        if named is not None:
            return named[0]
        return Match(self.rules["global"][""], "global") if "" in self.rules["global"] else None

    def has_type(self, kind: Kind) -> bool:
        """Return whether a rule or an exclusion is for a type or a function."""
        return any(kind in kinds for kinds in types_by_option(self).values())

    def _find(self, path: Iterable[tuple[str, Kind | None]]) -> tuple[Match, object] | None:
        """Return the first rule that names a module of a path, by precedence, with its name, regular expression or type."""
        for source in self.SOURCES[:-1]:
            for depth, (part, kind) in enumerate(path):
                key = self._key(source, part, kind)
                if key is not None:
                    return Match(self.rules[source][key], source, depth), key
        return None

    def _key(self, source: Source, name: str, object_type: Kind | None) -> str | Kind | None:
        """Return the key of the rule of one kind that names a module; None where there is none."""
        rules = self.rules[source]
        if source == "module_name_regex":
            return next((regex for regex in rules if re.fullmatch(regex, name)), None)
        key = name if source == "module_name" else object_type
        return key if key in rules else None

    def check_names(self, names: list[str]) -> None:
        """Raise ValueError for a name or a regex that matches none of a model's layers."""
        self._check_names(names, "QConfigMapping")
        if self.excluded is not None:
            self.excluded._check_names([*names, ""], "exclude")

    def _check_names(self, names: list[str], what: str) -> None:
        for name in self.rules["module_name"]:
            if name not in names:
                raise ValueError(f"{what}: " + unknown("layer", name, filter(None, names)))
        for regex in self.rules["module_name_regex"]:
            if not any(re.fullmatch(regex, name) for name in names):
                raise ValueError(
                    f"{what}: the regular expression '{regex}' matches no layer's full name. "
                    f"Known: {', '.join(filter(None, names))}."
                )

    def to_json(self) -> str:
        """Return the mapping as JSON, with types and functions as import paths."""
        rules: dict[str, object] = {
            source: [[text, q and q.to_dict()] for text, q in zip(self._texts(source), of.values(), strict=True)]
            for source, of in self.rules.items()
        }
        if self.excluded is not None:
            rules["exclude"] = [[source, text] for source in self.SOURCES for text in self.excluded._texts(source)]
        return json.dumps(rules, indent=2)

    def _texts(self, source: Source) -> list[str]:
        return [path_of(key) if source == "object_type" else key for key in self.rules[source]]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], types: Iterable[Kind] = ()) -> Self:
        """Build a mapping from the parsed JSON of `to_json`. Nothing is imported.

        Args:
            values: The parsed JSON.
            types: Your own module types and functions that it names. Types of torch, `operator` and qtoolkit need no entry.

        Raises:
            ValueError: A key or a value is unknown or of the wrong type. The error names its place.
        """
        check_mapping("QConfigMapping", values)
        check_sequence(types, "QConfigMapping.from_dict", "types", "module types and functions")
        mapping, types = cls(), tuple(types)
        known: tuple[Source | Literal["exclude"], ...] = (*cls.SOURCES, "exclude")
        for key in values:
            check_known("key of QConfigMapping", key, known)
        for source in known:
            rules = values.get(source, ())
            if not isinstance(rules, list | tuple):
                of = "layers" if source == "exclude" else "rules"
                raise ValueError(f"{source} must be a list of {of}, got {type(rules).__name__}.")
            for index, rule in enumerate(rules):
                with within(f"{source}[{index}]"):
                    if source == "exclude":
                        mapping._add_excluded(rule, types)
                    else:
                        mapping._add(source, rule, types)
        return mapping

    def _add(self, source: Source, rule: object, types: Iterable[Kind]) -> None:
        """Add a rule of the parsed JSON: a list of a name and a config."""
        if not (isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str)):
            raise ValueError("QConfigMapping: a rule must be a list of a text and a config or null.")
        qconfig = None if rule[1] is None else QConfig.from_dict(rule[1])
        if source == "object_type":
            self.set_object_type(kind_at(rule[0], types), qconfig)
        elif source == "module_name_regex":
            self.set_module_name_regex(rule[0], qconfig)
        elif source == "global" and rule[0]:
            raise ValueError(f"QConfigMapping: the global rule has the name '', got {rule[0]!r}.")
        else:
            self._set(source, rule[0], qconfig)

    def _add_excluded(self, layer: object, types: Iterable[Kind]) -> None:
        """Add an excluded layer of the parsed JSON: a list of the kind of its rule and a text."""
        if not (isinstance(layer, list | tuple) and len(layer) == 2):
            raise ValueError("QConfigMapping: an excluded layer must be a list of the kind of its rule and a text.")
        check_known("kind of rule", layer[0], self.SOURCES[:-1])
        excluded = self.excluded or QConfigMapping()
        excluded._add(layer[0], [layer[1], None], types)
        self.excluded = excluded

    @classmethod
    def from_json(cls, text: str, types: Iterable[Kind] = ()) -> Self:
        """Build a mapping from `to_json`'s result. Nothing is imported.

        Args:
            text: The JSON.
            types: As for `from_dict`.

        Raises:
            ValueError: The text is not JSON, or a key or a value is unknown or of the wrong type.
        """
        try:
            return cls.from_dict(json.loads(text), types)
        except RecursionError:
            raise ValueError("QConfigMapping: the JSON is nested too deeply.") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QConfigMapping):
            return False
        return self._written() == other._written() and self.excluded == other.excluded

    def _written(self) -> dict[str, object]:
        return {source: {key: q and q.to_dict() for key, q in of.items()} for source, of in self.rules.items()}

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = [f"{source} {key}: {q and q.describe()}" for source, of in self.rules.items() for key, q in of.items()]
        if self.excluded is not None:
            rules += [f"exclude {key}" for of in self.excluded.rules.values() for key in of]
        return f"QConfigMapping({'; '.join(rules)})"


def warn_of_unused_types(
    option: str, kinds: Iterable[Kind], known: Collection[Kind], fact: str = "is not in the model"
) -> None:
    """Warn of the types and functions in an option of a public function that have no effect on a model with the `known` ones.

    `option` begins the warning, and `fact` says what is wrong with those that are not known.
    """
    for kind in kinds:
        if kind not in known:
            message = f"{option} {getattr(kind, '__name__', kind)}, which {fact} and has no effect."
            warn(message)


def with_excluded(mapping: QConfigMapping | None, exclude: Exclude | None) -> QConfigMapping | None:
    """Return a mapping, or its copy that excludes the layers of the `exclude` argument of a public function."""
    if exclude is None:
        return mapping
    layers = [exclude] if isinstance(exclude, str | type) or not isinstance(exclude, Iterable) else list(exclude)
    return (QConfigMapping() if mapping is None else mapping.copy()).exclude(*layers) if layers else mapping


def types_by_option(mapping: QConfigMapping | None) -> dict[str, list[Kind]]:
    """Return the types and functions that a mapping and its exclusions name, by the words of a warning for each of them."""
    of = {"qconfig_mapping has a rule for": mapping, "exclude names": None if mapping is None else mapping.excluded}
    return {option: list(rules.rules["object_type"]) for option, rules in of.items() if rules is not None}


def check_qconfig_mapping(what: str, mapping: object) -> None:
    """Raise TypeError, which begins with `what`, unless an argument is a QConfigMapping or None."""
    if mapping is not None and not isinstance(mapping, QConfigMapping):
        raise TypeError(
            f"{what}: qconfig_mapping must be a QConfigMapping of qtoolkit or None, got "
            f"{type_beside(mapping, QConfigMapping)}; write "
            f"qtoolkit.QConfigMapping().set_global(qtoolkit.QConfig(activation, weight))."
        )


def _check_text(what: str, argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"{what}: {argument} must be one text, such as 'layer1.0.conv', got {shown(value)}; call it once for each."
        )


def _way_of_module(kind: object) -> str:
    # A module can be called, as a function can, but a rule for it would find nothing in the copy that is quantized.
    return "; name the module by its dotted name in the model, or by its type" if isinstance(kind, nn.Module) else ""
