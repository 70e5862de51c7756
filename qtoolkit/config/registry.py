"""The tables of the quantizers and observers that a QuantSpec may name, which `qtoolkit.quantizers.table` fills."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from qtoolkit.config.spec import QuantSpec


class ObserverEntry(Protocol):
    """What a spec asks of the entry of its observer: a type of `Observer`."""

    @property
    def OPTIONS(self) -> Mapping[str, Any]:  # noqa: N802  # a constant of the class
        """The options that the spec may have, with their defaults."""

    def check(self, spec: "QuantSpec") -> None:
        """Raise ValueError for a spec that it does not support, or for an option out of its range."""


class QuantizerEntry(ObserverEntry, Protocol):
    """What a spec asks of the entry of its quantizer: a `QuantizerKind`."""

    label: str


class Registry:
    """The tables, by name. They are empty until the package of quantizers is imported."""

    observers: Mapping[str, ObserverEntry] = {}
    quantizers: Mapping[str, QuantizerEntry] = {}


REGISTRY = Registry()
