"""Tensors that torch.distributed.fsdp.fully_shard has divided over processes."""

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor; importing its class takes a second, which most users do not need to spend.

    Inside a forward, and so in compiled code, fully_shard has gathered the parameters.
    """
    return not torch.compiler.is_compiling() and hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has: all of it, if it is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. If it is sharded, every process must call this."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full
