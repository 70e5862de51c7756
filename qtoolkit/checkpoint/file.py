"""Checkpoints as one safetensors file, which any reader of this format can open; and state dicts saved by other programs."""

import pickle
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, distributed

from qtoolkit.checkpoint.contents import random_name
from qtoolkit.checkpoint.record import KEY, OWN, Record, parsed
from qtoolkit.files import replacing
from qtoolkit.processes import is_sharded, raising_on_all_ranks, rank, ranks
from qtoolkit.wrapped import PREFIXES

T = TypeVar("T")

WRAPPINGS = ("state_dict", "model_state_dict", "model")  # entries in which scripts keep a model's state dict


@dataclass
class InMemory:
    """The tensors of a file by name, and the record (only the metadata for a state dict)."""

    tensors: dict[str, Tensor]
    record: Record

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def for_names(self, own: Collection[str]) -> "InMemory":
        """Return a state dict without the name prefix of a wrapper, for a model with these `own` names."""
        wrapper = wrapper_of(self.tensors)
        if not wrapper or self.record.version is not None or not set(own).isdisjoint(self.tensors):
            return self
        modules = {name.removeprefix(wrapper): value for name, value in self.record.modules.items()}
        return InMemory({name.removeprefix(wrapper): t for name, t in self.tensors.items()}, Record(modules))

    def read(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are distributed over processes like given ones."""
        return {name: _distributed_like(self.tensors[name], tensor) for name, tensor in like.items()}


def _distributed_like(tensor: Tensor, like: Tensor) -> Tensor:
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every process has all of it.
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def write_file(tensors: Mapping[str, Tensor], record: Record, path: Path) -> None:
    """Write a file on rank 0, with the random states of all ranks; ValueError for a sharded model."""
    sharded = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    if sharded:
        raise ValueError(
            f"save_checkpoint: {sharded[0]!r} is sharded over processes, but {str(path)!r} is a single file; pass a folder, "
            "into which every process writes its own shards."
        )
    everything = {**tensors, **_random_states(tensors)}
    with raising_on_all_ranks("save_checkpoint"):
        if rank() == 0:
            _write(everything, record, path)


def _random_states(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mine = f"{OWN}{random_name(rank())}"
    if ranks() == 1 or mine not in tensors:
        return {}
    gathered: list[Tensor | None] | None = [None] * ranks() if rank() == 0 else None
    distributed.gather_object(tensors[mine], gathered)
    return {f"{OWN}{random_name(r)}": state for r, state in enumerate(gathered or ()) if state is not None}


def _write(tensors: Mapping[str, Tensor], record: Record, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as place:
            save_file(dict(tensors), place, {"format": "pt", KEY: record.to_json()})
    except SafetensorError as error:
        raise OSError(
            f"save_checkpoint: {str(path)!r} cannot be written ({error}); an existing file is unchanged."
        ) from None


def read_file(path: Path) -> InMemory:
    """Read a safetensors file from `write_file`, or from another program (without a record); ValueError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"it is not a complete safetensors file ({error})") from None
    return InMemory(tensors, Record() if text is None else Record.from_values(parsed(text)))


# ---- state dicts of other programs, by torch.save, in the dicts that scripts use


def read_pickle(path: Path) -> InMemory:
    """Read a state dict from a torch.save file without executing pickled objects; ValueError if it holds more than tensors."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        name = re.search(r"GLOBAL (\S+)", str(error))  # the rest is advice on other arguments of torch.load
        reason = f"it holds {name[1]}" if name else f"torch.load raises {type(error).__name__}"
        raise ValueError(
            f"it does not hold only tensors ({reason}). Other pickles can execute arbitrary code and are not loaded: if you "
            "trust the file, save its state dict with torch.save(model.state_dict(), path)"
        ) from None
    found = content
    if isinstance(content, Mapping):
        found = next((content[name] for name in WRAPPINGS if isinstance(content.get(name), Mapping)), content)
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError("it holds no state dict (a mapping of names to tensors)")
    return InMemory(dict(found), Record(getattr(found, "_metadata", {})))


def wrapper_of(names: Collection[str]) -> str:
    """Return the prefix that wrappers of a model add to all names of its state dict; "" for none."""
    found = ""
    while names and (more := [each for each in PREFIXES if all(name.startswith(found + each) for name in names)]):
        found += more[0]
    return found


def without_wrapper(state: Mapping[str, T]) -> Mapping[str, T]:
    """Return a state dict with the names of the unwrapped model."""
    wrapper = wrapper_of(state)
    return {key.removeprefix(wrapper): value for key, value in state.items()} if wrapper else state
