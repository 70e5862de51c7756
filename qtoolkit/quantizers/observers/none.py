"""The observer of quantizers that compute their scales from each input."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qtoolkit.quantizers.observers.base import Observer


class NoObserver(Observer):
    """Observes nothing."""

    def forward(self, x: Tensor) -> None:
        """Do nothing."""

    def range(self) -> tuple[Tensor, Tensor]:
        """Return an empty range."""
        return torch.tensor(torch.inf), torch.tensor(-torch.inf)

    def seen(self) -> bool:
        """Return False."""
        return False

    def finite(self) -> bool:
        """Return True."""
        return True

    def reset(self) -> None:
        """Do nothing."""

    def resize(self, shape: tuple[int, ...]) -> None:
        """Do nothing."""

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Do nothing."""
