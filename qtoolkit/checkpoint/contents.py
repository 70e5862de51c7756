"""The content of a checkpoint: the tensors of a model and of its training, and the record."""

import json
from collections.abc import Hashable, Mapping
from functools import partial
from itertools import chain, count
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qtoolkit.checkpoint.optimizers import Keep, optimizer_tree
from qtoolkit.checkpoint.record import OWN, VERSION, Json, Record, decode, encode
from qtoolkit.eager.record import plan_of
from qtoolkit.model_state import RandomState
from qtoolkit.processes import is_sharded, rank, ranks


class Stateful(Protocol):
    """An object of the state that is saved by its state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state."""


def _keep_state_dict(tensors: dict[str, Tensor], saved: Mapping[str, object]) -> dict[str, str]:
    """Add the entries of a model's state dict; return the entries that share a tensor with another one, with its name."""
    aliases, seen = dict[str, str](), dict[Hashable, str]()
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"save_checkpoint: the entry {name!r} of the state dict is a {type(value).__name__}, but a checkpoint can hold "
                "only tensors; let get_extra_state return a tensor."
            )
        first = seen.setdefault(_identity(name, value), name)
        if first == name:
            tensors[name] = value.detach()
        else:
            aliases[name] = first
    return aliases


def _keep(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> str:
    """Add a tensor from outside the model's state dict, and return its key."""
    keys = chain([f"{OWN}{name}"], (f"{OWN}{name}/{number}" for number in count(1)))
    key = next(key for key in keys if key not in tensors)
    tensors[key] = tensor.detach()
    return key


def contents_of(
    model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, object], version: str
) -> tuple[dict[str, Tensor], Record]:
    """Return the tensors of this process for a checkpoint, and its record.

    Raises TypeError for a state that a checkpoint cannot hold, ValueError for the optimizer of another model.
    """
    tensors, saved = dict[str, Tensor](), model.state_dict()
    aliases, keep = _keep_state_dict(tensors, saved), partial(_keep, tensors)
    trees = {name: _tree(name, value, keep) for name, value in state.items()}
    of_optimizer = None if optimizer is None else optimizer_tree(model, optimizer, keep)
    if optimizer is not None:
        keep(random_name(rank()), random_bytes())
    plan = plan_of(model)
    record = Record(
        modules=getattr(saved, "_metadata", {}),
        aliases=aliases,
        backend=None if plan is None else plan.backend.name,
        mapping=None if plan is None or plan.mapping is None else plan.mapping.to_json(),
        optimizer=of_optimizer,
        state=trees,
        ranks=ranks(),
        qtoolkit=version,
        version=VERSION,
    )
    memory: set[int] = set()
    return {name: _alone(tensor, memory) for name, tensor in tensors.items()}, record


def random_name(rank: int) -> str:
    """Return the name of the random state of a process."""
    return f"random/{rank}"


def is_object(value: object) -> TypeGuard[Stateful]:
    """Return whether a value of the state is saved by its state dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _tree(name: str, value: object, keep: Keep) -> dict[str, Json]:
    kind, content = ("object", value.state_dict()) if is_object(value) else ("value", value)
    return {kind: encode(content, f"state[{name!r}]", partial(keep, f"state/{name}"))}


def _identity(name: str, tensor: Tensor) -> Hashable:
    """Return a key that is equal for entries of a state dict with the same tensor."""
    if type(tensor) is not Tensor or tensor.numel() == 0:  # of other types, only the name is known to tell them apart
        return (name,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _alone(tensor: Tensor, seen: set[int]) -> Tensor:
    """Return a contiguous tensor that does not share memory, as the format requires; `seen` has the memory of others."""
    if is_sharded(tensor):  # torch.distributed.checkpoint copies the shards that are not
        return tensor
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if alone and tensor.data_ptr() not in seen:
        seen.add(tensor.data_ptr())
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- the states of random number generators, as one tensor of bytes


def random_bytes() -> Tensor:
    """Return the states of the generators of Python, NumPy and torch, on the CPU and on this process's GPU."""
    now = RandomState.now()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    states = (now.of_torch.tolist(), now.of_python, now.of_numpy, None if on_gpu is None else on_gpu.tolist())
    text = json.dumps(encode(states, "the random state"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore_random(saved: Tensor) -> None:
    """Set the generators to the states of `random_bytes`, or raise ValueError."""
    try:
        of_torch, of_python, of_numpy, on_gpu = decode(json.loads(bytes(saved.tolist())))
        RandomState(torch.tensor(of_torch, dtype=torch.uint8), of_python, of_numpy).restore()
        if on_gpu is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(on_gpu, dtype=torch.uint8))
    except (TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"its states of random number generators are not readable ({error})") from None
