"""What to quantize and how: frozen values that compare, print, and go to JSON and back."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Any, Literal, Self

from qtoolkit.names import check_known, unknown

FORMATS = ("int",)
OBSERVERS = {"minmax": (), "moving_average": ("momentum",), "histogram": ("bins", "method", "percentile")}
METHODS = ("percentile", "mse", "l2", "entropy")
QUANTIZERS = ("fixed", "lsq")


@dataclass(frozen=True)
class QuantSpec:
    """How one kind of tensor is quantized.

    Attributes:
        bits: Width of a code, 2 to 16.
        signed: Codes from -2^(bits-1) to 2^(bits-1)-1; else from 0 to 2^bits-1.
        symmetric: No zero point: zero is code 0.
        narrow: Leave out the lowest code, so that a signed range is symmetric.
        axis: Channel axis with a scale of its own for each channel; None is one scale for the tensor.
        group_size: Elements that share a scale along the axis; only None so far.
        pow2_scale: Round scales up to powers of two.
        format: "int".
        observer: "minmax" (the range of all that was seen), "moving_average" or "histogram" (the range that a method chooses
            from a histogram of all that was seen; per tensor only).
        observer_args: Options of the observer: `momentum` of "moving_average", 0.1 unless given; of "histogram" `bins`
            (2048), `method` ("mse"; or "l2", "entropy", "percentile") and `percentile` (99.99).
        quantizer: "fixed" (the scale follows from the range) or "lsq" (the scale is trained, arXiv 1902.08153).
        quantizer_args: Options of the quantizer; neither of the two has one.

    Raises:
        ValueError: A value is out of its range, or a name is not known.

    Example:
        >>> spec = QuantSpec(bits=4, narrow=True)
        >>> spec.qmin, spec.qmax
        (-7, 7)
        >>> QuantSpec.from_dict({"bit": 4})
        Traceback (most recent call last):
        ...
        ValueError: unknown key of QuantSpec 'bit'; did you mean 'bits'? Known: axis, bits, format, group_size, ...
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow: bool = False
    axis: int | None = None
    group_size: int | None = None
    pow2_scale: bool = False
    format: Literal["int"] = "int"
    observer: str = "minmax"
    observer_args: Mapping[str, Any] = field(default_factory=dict)
    quantizer: str = "fixed"
    quantizer_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 16:
            raise ValueError(f"QuantSpec: bits must be a whole number from 2 to 16, got {self.bits!r}.")
        if self.axis is not None and type(self.axis) is not int:
            raise ValueError(f"QuantSpec: axis must be a whole number or None, got {self.axis!r}.")
        if self.group_size is not None:
            raise ValueError(
                f"QuantSpec: group_size must be None in this version, got {self.group_size!r}; use axis for a scale per "
                f"channel."
            )
        check_known("format", self.format, FORMATS)
        check_known("observer", self.observer, OBSERVERS)
        check_known("quantizer", self.quantizer, QUANTIZERS)
        _check_args(f"observer {self.observer!r}", self.observer_args, OBSERVERS[self.observer])
        if self.observer == "histogram":
            self._check_histogram(**self.observer_args)
        _check_args(f"quantizer {self.quantizer!r}", self.quantizer_args, ())
        if self.pow2_scale and self.quantizer == "lsq":
            raise ValueError("QuantSpec: pow2_scale=True needs quantizer='fixed'; 'lsq' trains scales of any value.")

    def _check_histogram(self, bins: object = 2048, method: str = "mse", percentile: float = 99.99) -> None:
        if self.axis is not None:
            raise ValueError(
                f"QuantSpec: observer='histogram' needs axis=None, got axis={self.axis}; take 'minmax' for a scale per "
                f"channel."
            )
        if type(bins) is not int or bins % 2 or not 2 <= bins <= 1 << 20:
            raise ValueError(f"QuantSpec: bins must be an even number from 2 to {1 << 20}, got {bins!r}.")
        check_known("method of observer 'histogram'", method, METHODS)
        if not 0 < percentile <= 100:
            raise ValueError(f"QuantSpec: percentile must lie in (0, 100], got {percentile!r}.")

    @property
    def qmin(self) -> int:
        """Lowest code."""
        return (-(1 << self.bits - 1) if self.signed else 0) + int(self.narrow)

    @property
    def qmax(self) -> int:
        """Highest code."""
        return (1 << self.bits - int(self.signed)) - 1

    def describe(self) -> str:
        """Return a short name, as reports print it.

        Example:
            >>> QuantSpec(axis=0).describe(), QuantSpec(signed=False, symmetric=False, quantizer="lsq").describe()
            ('int8 per-channel(0)', 'uint8 affine lsq')
        """
        words = [f"{'' if self.signed else 'u'}int{self.bits}"]
        words += ["narrow"] if self.narrow else []
        words += [] if self.symmetric else ["affine"]
        words += [] if self.axis is None else [f"per-channel({self.axis})"]
        words += ["pow2"] if self.pow2_scale else []
        words += [] if self.quantizer == "fixed" else [self.quantizer]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a spec from `to_dict`'s result.

        Raises:
            ValueError: A key or a value is not known.
        """
        names = [f.name for f in fields(cls)]
        for key in values:
            check_known("key of QuantSpec", key, names)
        return cls(**values)


def _check_args(of: str, args: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in args:
        if key not in known:
            raise ValueError(
                unknown(f"option of {of}", key, known) if known else f"{of} takes no options, got {key!r}."
            )


@dataclass(frozen=True)
class QConfig:
    """How a layer is quantized: its input activations and its weight; None leaves them in float.

    Example:
        >>> QConfig(activation=QuantSpec(), weight=QuantSpec(axis=0)).describe()
        'activation int8, weight int8 per-channel(0)'
    """

    activation: QuantSpec | None
    weight: QuantSpec | None

    def describe(self) -> str:
        """Return a short name, as reports print it."""
        parts = {"activation": self.activation, "weight": self.weight}
        return ", ".join(f"{name} {'float' if spec is None else spec.describe()}" for name, spec in parts.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the specs, as JSON can hold them."""
        return {name: spec and spec.to_dict() for name, spec in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from `to_dict`'s result.

        Raises:
            ValueError: A key or a value is not known.
        """
        for key in values:
            check_known("key of QConfig", key, ("activation", "weight"))
        specs = {name: values.get(name) for name in ("activation", "weight")}
        return cls(**{name: None if spec is None else QuantSpec.from_dict(spec) for name, spec in specs.items()})


Kind = type | Callable[..., Any]
Source = Literal["module_name", "module_name_regex", "object_type", "global"]


@dataclass(frozen=True)
class Match:
    """The config that holds for a layer, and the rule that gave it."""

    qconfig: QConfig | None
    source: Source


class QConfigMapping:
    """Which layers get which config. An exact name comes before a regex, a regex before a type, a type before global.

    A config of None leaves the layer in float. Layers without any rule take the backend's default.

    Example:
        >>> w4 = QConfig(QuantSpec(bits=4), QuantSpec(bits=4, axis=0))
        >>> mapping = QConfigMapping().set_module_name_regex(r"layer[12]\\..*", w4).set_module_name("fc", None)
        >>> mapping.match("layer1.0.conv1", torch.nn.Conv2d).qconfig == w4
        True
        >>> mapping.match("fc", torch.nn.Linear)
        Match(qconfig=None, source='module_name')
        >>> QConfigMapping.from_json(mapping.to_json()) == mapping
        True
    """

    SOURCES: tuple[Source, ...] = ("module_name", "module_name_regex", "object_type", "global")

    def __init__(self) -> None:
        self.rules: dict[Source, dict[Any, QConfig | None]] = {source: {} for source in self.SOURCES}

    def set_global(self, qconfig: QConfig | None) -> Self:
        """Set the config of every layer that no other rule names."""
        return self._set("global", "", qconfig)

    def set_object_type(self, object_type: Kind, qconfig: QConfig | None) -> Self:
        """Set the config of a module type, such as torch.nn.Conv2d, or of a function, such as torch.add."""
        if not callable(object_type):
            raise TypeError(f"set_object_type: object_type must be a type or a function, got {object_type!r}.")
        return self._set("object_type", object_type, qconfig)

    def set_module_name_regex(self, regex: str, qconfig: QConfig | None) -> Self:
        """Set the config of the layers whose whole dotted name a regular expression matches."""
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"set_module_name_regex: {regex!r} is no regular expression: {error}.") from None
        return self._set("module_name_regex", regex, qconfig)

    def set_module_name(self, name: str, qconfig: QConfig | None) -> Self:
        """Set the config of the layer with this dotted name."""
        return self._set("module_name", name, qconfig)

    def _set(self, source: Source, key: object, qconfig: QConfig | None) -> Self:
        if qconfig is not None and not isinstance(qconfig, QConfig):
            raise TypeError(f"QConfigMapping: a config must be a QConfig or None, got {type(qconfig).__name__}.")
        self.rules[source][key] = qconfig
        return self

    def match(self, name: str, object_type: Kind | None) -> Match | None:
        """Return the config that holds for a layer, by precedence; None where no rule does."""
        if name in self.rules["module_name"]:
            return Match(self.rules["module_name"][name], "module_name")
        for regex, qconfig in self.rules["module_name_regex"].items():
            if re.fullmatch(regex, name):
                return Match(qconfig, "module_name_regex")
        if object_type in self.rules["object_type"]:
            return Match(self.rules["object_type"][object_type], "object_type")
        if "" in self.rules["global"]:
            return Match(self.rules["global"][""], "global")
        return None

    def check_names(self, names: list[str]) -> None:
        """Raise ValueError for a rule by name that fits none of a model's layers."""
        for name in self.rules["module_name"]:
            if name not in names:
                raise ValueError("QConfigMapping: " + unknown("layer", name, names))
        for regex in self.rules["module_name_regex"]:
            if not any(re.fullmatch(regex, name) for name in names):
                raise ValueError(
                    f"QConfigMapping: the regular expression {regex!r} matches the whole name of no layer. "
                    f"Known: {', '.join(names)}."
                )

    def to_json(self) -> str:
        """Return the mapping as JSON; types and functions by their import path."""
        return json.dumps(
            {
                source: [
                    [_path_of(key) if source == "object_type" else key, q and q.to_dict()] for key, q in rules.items()
                ]
                for source, rules in self.rules.items()
            },
            indent=2,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a mapping from the parsed JSON of `to_json`.

        Raises:
            ValueError: A key or a value is not known, or a type's path does not import.
        """
        mapping = cls()
        for source, rules in values.items():
            check_known("key of QConfigMapping", source, cls.SOURCES)
            for key, qconfig in rules:
                found = _import(key) if source == "object_type" else key
                mapping._set(source, found, None if qconfig is None else QConfig.from_dict(qconfig))  # type: ignore[arg-type]
        return mapping

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a mapping from `to_json`'s result.

        Raises:
            ValueError: The text is no JSON, or a key or a value is not known.
        """
        return cls.from_dict(json.loads(text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QConfigMapping) and self.rules == other.rules

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = [f"{source} {key}: {q and q.describe()}" for source, of in self.rules.items() for key, q in of.items()]
        return f"QConfigMapping({'; '.join(rules)})"


def _path_of(kind: Kind) -> str:
    short = f"{kind.__module__}:{kind.__name__}"
    try:
        found = _import(short)  # torch.add, for one, has a qualified name that does not import
    except ValueError:
        found = None
    return short if found is kind else f"{kind.__module__}:{kind.__qualname__}"


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"QConfigMapping: {path!r} does not import; write module:name.") from None
    return found
