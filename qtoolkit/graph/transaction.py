"""What keeps the user's model safe: a copy to work on, or, where there is none, the way back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def copy_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model.

    Raises:
        TypeError: It cannot be copied; says why.
    """
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"prepare: the model cannot be copied ({type(error).__name__}: {error}); make copy.deepcopy(model) work, or pass "
            f"inplace=True and no example_inputs."
        ) from error


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Put a model back as it was if the block fails: its submodules, parameters, attributes, modes, and buffers' values."""
    states = [(module, _shallow(vars(module))) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    except BaseException:
        for module, state in states:
            vars(module).clear()
            vars(module).update(state)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        raise


def _shallow(state: dict[str, Any]) -> dict[str, Any]:
    # Hooks, submodules and parameters are held in dicts of the module's own.
    return {name: value.copy() if isinstance(value, dict) else value for name, value in state.items()}


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Leave torch's random numbers, of the CPU and of the model's devices, where they were."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        yield
