"""The tensors of a checkpoint that was read as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qtoolkit.checkpoint.record import Record


@dataclass
class InMemory:
    """The tensors of a file by their names.

    Attributes:
        tensors: The tensors.
        record: The record; None if `qtoolkit.save_checkpoint` did not write it.
        metadata: The metadata of the state dict, where there is no record.
    """

    tensors: dict[str, Tensor]
    record: Record | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are distributed over processes as others are."""
        return {name: _distributed_like(self.tensors[name], tensor) for name, tensor in like.items()}


def _distributed_like(tensor: Tensor, like: Tensor) -> Tensor:
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(like.device), mesh, placements, src_data_rank=None
    )  # every process has all of it
