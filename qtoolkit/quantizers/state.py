"""What the tensors of quantizers and observers are to casts and to state dicts."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn


class KeepsFloat32(nn.Module):
    """A module whose own buffers and parameters are ranges or scales: casting a model to half precision leaves them."""

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
    """A module of quantization: where a state dict holds nothing of it, it keeps what it has.

    So the state dict of a float model loads, strictly, into its prepared form.
    """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
