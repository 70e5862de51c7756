"""State dicts that other code has saved: by torch.save, in the wrappings that scripts give them."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtoolkit.checkpoint.file import InMemory
from qtoolkit.checkpoint.record import Record

WRAPPINGS = ("state_dict", "model_state_dict", "model")  # entries in which scripts keep a model's state dict
WRAPPER = "module."  # begins the names of a model in DistributedDataParallel


def read_pickle(path: Path) -> InMemory:
    """Read a state dict from a file of torch.save, without running code that the file may hold.

    Raises:
        ValueError: It holds more than tensors and plain values, or no state dict.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"it is not a file of tensors alone ({_found(error)}). Other pickles may run code and are not loaded: where you "
            f"trust it, save its state dict by torch.save(model.state_dict(), path)"
        ) from None
    found = content
    if isinstance(content, Mapping):
        found = next((content[name] for name in WRAPPINGS if isinstance(content.get(name), Mapping)), content)
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError("it holds no state dict, which is a mapping of names to tensors")
    metadata = getattr(found, "_metadata", {})
    if is_wrapped(found):
        metadata = {name.removeprefix(WRAPPER): value for name, value in metadata.items()}
    return InMemory(dict(without_wrapper(found)), Record(metadata))


def _found(error: Exception) -> str:
    name = re.search(r"GLOBAL (\S+)", str(error))  # the rest is advice on other arguments of torch.load
    return f"it holds {name[1]}" if name else f"torch.load raises {type(error).__name__}"


def is_wrapped(state: Mapping[str, Any]) -> bool:
    """Return whether a state dict is that of a model in DistributedDataParallel."""
    return bool(state) and all(key.startswith(WRAPPER) for key in state)


def without_wrapper(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with the names that the model in DistributedDataParallel has."""
    return {key.removeprefix(WRAPPER): value for key, value in state.items()} if is_wrapped(state) else state
