"""Models that take long to prepare and calibrate are made once for all tests that ask for the same one."""

import copy
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def made_once(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Let a function that seeds the random numbers itself run once for equal arguments, and return a copy to each caller.

    The arguments are told apart by what they print as: specs, names and classes. Random numbers go on as if it had run.
    """
    made: dict[str, tuple[Made, torch.Tensor]] = {}

    @functools.wraps(make)
    def copied(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        key = repr((args, sorted(kwargs.items())))
        if key not in made:
            made[key] = make(*args, **kwargs), torch.get_rng_state()
        found, numbers = made[key]
        torch.set_rng_state(numbers)
        return copy.deepcopy(found)

    return copied
