"""How quantizers and observers react to casts and state dicts."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn


def scale_dtype() -> torch.dtype:
    """Return the dtype of new scales and ranges: torch's default dtype, but at least float32."""
    default = torch.get_default_dtype()
    return default if default == torch.float64 else torch.float32


class KeepsFloat32(nn.Module):
    """A module whose own parameters and buffers stay in float32 or float64 when the model is cast to half precision."""

    kept_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.int64)

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
    """A module that keeps its state if a state dict has no entry of such modules.

    The state dict of a float model can therefore be loaded strictly into the prepared model. A state dict with an entry of
    one such module must have the entries of all.
    """

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *args)
        self.leave_meta_device()
        latest_load(missing_keys).add(prefix, missing, any(key.startswith(prefix) for key in state_dict))

    def leave_meta_device(self) -> None:
        """Set tensors that are not in the state dict to zero, on the device of those from `load_state_dict(assign=True)`."""
        device = next((buffer.device for buffer in self.buffers(recurse=False) if not buffer.is_meta), None)
        for name in self._non_persistent_buffers_set if device is not None else ():
            buffer = self._buffers[name]
            if buffer is not None and buffer.is_meta:
                setattr(self, name, torch.zeros_like(buffer, device=device))


@dataclass
class _Load:
    """The findings of one call of `load_state_dict`: it calls each module with the same list of missing keys."""

    missing_keys: list[str]
    missing: list[str] = field(default_factory=list)  # to report if the state dict is not a float model's
    of_float_model: bool = True
    found: set[str] = field(default_factory=set)  # the prefixes of the modules of which there is an entry
    # the ids of layers with entries, but none of their quantizers
    float_layers: set[int] = field(default_factory=set)

    def add(self, prefix: str, missing: list[str], found: bool) -> None:
        """Note the keys that a module misses. Once a module has an entry, which no float model's has, all are reported."""
        self.found |= {prefix} if found else set()
        self.missing += missing
        self.of_float_model = self.of_float_model and not found
        if not self.of_float_model:
            self.missing_keys += self.missing
            self.missing.clear()


class _Latest(threading.local):
    load = _Load([])  # of the latest call in this thread


_LATEST = _Latest()


def latest_load(missing_keys: list[str]) -> _Load:
    """Return the findings of the call of `load_state_dict` with this list of missing keys: a new list is a new call."""
    if _LATEST.load.missing_keys is not missing_keys:
        _LATEST.load = _Load(missing_keys)
    return _LATEST.load
