"""How quantizers and observers react to casts and state dicts."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn


class KeepsFloat32(nn.Module):
    """A module whose own parameters and buffers stay in float32 or float64 when the model is cast to half precision."""

    kept_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: tensor.detach() for name, tensor in self._own_tensors()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, new in self._own_tensors():
            if new.dtype not in self.kept_dtypes:
                new.data = before[name].to(new.device)
        return self

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters(recurse=False)
        yield from self.named_buffers(recurse=False)


class LoadsFloatCheckpoints(nn.Module):
    """A module that keeps its state if a state dict has no entry for it.

    The state dict of a float model can therefore be loaded strictly into the prepared model.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
