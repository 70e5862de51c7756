"""The states of the random number generators that a model's Python may draw from."""

import random
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of the default generators of torch (on the CPU), of Python's `random` and of NumPy, if it is loaded.

    Two states are equal if no generator has drawn between them.

    Example:
        >>> import random
        >>> before = RandomState.now()
        >>> drawn = random.random()
        >>> before == RandomState.now()
        False
        >>> before.restore()
        >>> random.random() == drawn
        True
    """

    of_torch: Tensor
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> Self:
        """Return the current states."""
        of_numpy = None
        if "numpy" in sys.modules:
            name, keys, *rest = import_module("numpy.random").get_state()
            of_numpy = (name, tuple(keys.tolist()), *rest)
        return cls(torch.get_rng_state(), random.getstate(), of_numpy)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomState)
            and torch.equal(self.of_torch, other.of_torch)
            and (self.of_python, self.of_numpy) == (other.of_python, other.of_numpy)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            import_module("numpy.random").set_state(self.of_numpy)
