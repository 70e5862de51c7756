"""A module that another one uses, and that has its place elsewhere in the model."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unregistered(Generic[T]):
    """Holds a module, so that an attribute does not register it.

    torch makes a module that is set as an attribute a submodule. A module that the model has elsewhere would then have a second
    name, under which a state dict has its tensors again.

    Attributes:
        value: The module.
    """

    value: T
