"""The modules that torch puts around a model: what they contain, and what to do where the model itself is needed."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


class Wrapper(NamedTuple):
    """How a wrapper contains its model.

    Attributes:
        holds: The attribute that is the model; None where the model cannot be taken out.
        remedy: What to do instead of preparing it; None where `prepare` takes it.
    """

    holds: str | None
    remedy: str | None


WRAPPERS: Mapping[str, Wrapper] = {  # by the names of torch's classes
    "DistributedDataParallel": Wrapper("module", "prepare model.module first, then wrap the result"),
    "DataParallel": Wrapper("module", "prepare model.module first, then wrap the result"),
    "FullyShardedDataParallel": Wrapper(None, "prepare the model before it is sharded, then shard the result"),
    "FSDPModule": Wrapper(None, "prepare the model before it is sharded, then shard the result"),
    "OptimizedModule": Wrapper(
        "_orig_mod", "prepare model._orig_mod, the model before torch.compile, then compile the result"
    ),
    "ScriptModule": Wrapper(None, "prepare the Python model that was scripted"),
    "CheckpointWrapper": Wrapper("_checkpoint_wrapped_module", None),
}
PREFIXES = tuple(f"{wrapper.holds}." for wrapper in WRAPPERS.values() if wrapper.holds)  # of names in state dicts


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the class of torch that makes a module a wrapper; None for any other module."""
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch."))
    return next((name for name in bases if name in WRAPPERS), None)


def unwrapped(model: M) -> M:
    """Return the model in any number of wrappers: the module to call, and the module with the names of a state dict.

    Example:
        >>> layer = nn.ReLU()
        >>> unwrapped(torch.compile(nn.DataParallel(layer))) is layer
        True
    """
    name = wrapper_of(model)
    holds = None if name is None else WRAPPERS[name].holds
    return model if holds is None else unwrapped(cast("M", model._modules[holds]))
