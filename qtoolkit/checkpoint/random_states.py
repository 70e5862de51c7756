"""The states of a process's random number generators as one tensor of bytes."""

import json
from typing import Any

import torch
from torch import Tensor

from qtoolkit.checkpoint.tree import decode, encode
from qtoolkit.random_state import RandomState


def random_bytes() -> Tensor:
    """Return the states of the generators of Python, NumPy and torch, on the CPU and on this process's GPU."""
    now = RandomState.now()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    states = (now.of_torch.tolist(), now.of_python, now.of_numpy, None if on_gpu is None else on_gpu.tolist())
    text = json.dumps(encode(states, "the random state", str))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore_random(saved: Tensor) -> None:
    """Set the generators to the states of `random_bytes`.

    Raises:
        ValueError: They are not states of generators.
    """
    try:
        of_torch, of_python, of_numpy, on_gpu = decode(json.loads(bytes(saved.tolist())), _no_tensor)
        RandomState(torch.tensor(of_torch, dtype=torch.uint8), of_python, of_numpy).restore()
        if on_gpu is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(on_gpu, dtype=torch.uint8))
    except (TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"its states of random number generators are not readable ({error})") from None


def _no_tensor(key: str) -> Any:
    raise ValueError(f"a random state has no tensor, got {key!r}")
