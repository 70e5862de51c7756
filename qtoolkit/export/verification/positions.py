"""Positions of maxima. Where a pool's window has two values that differ by a rounding error, runtimes may choose either."""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The name of each function of torch.nn.functional that returns positions, with the number of its dimensions.
POOLS = re.compile(r"(?:adaptive_)?max_pool(\d)d_with_indices")
SUM_ERROR = 2**-18  # of the largest value: 32 units in the last place of a float32 sum


class ChosenMaxima(TorchFunctionMode):
    """Lets pools that return positions return those that another runtime chose, where these hold a maximum too.

    Otherwise an unpooling would place a value elsewhere, and all its codes there would differ.

    Args:
        positions: The positions of each call, in order, counted through the whole input as ONNX's MaxPool does. A pool whose
            turn finds none of its shape keeps its own.
    """

    def __init__(self, positions: Iterable[Any]) -> None:
        super().__init__()
        self.positions = iter(positions)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and choose the positions that it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        pool = POOLS.fullmatch(getattr(func, "__name__", ""))
        given = None if pool is None else next(self.positions, None)
        if pool is None or given is None or given.size != result[1].numel():
            return result
        maxima, own = result
        x = args[0] if args else kwargs["input"]
        return maxima, _chosen(x, maxima, own, torch.as_tensor(given, device=x.device), int(pool[1]))


def _chosen(x: Tensor, maxima: Tensor, own: Tensor, given: Tensor, dims: int) -> Tensor:
    given = given.reshape(own.shape) % math.prod(x.shape[-dims:])  # torch counts within a plane
    values = x.flatten(-dims).gather(-1, given.flatten(-dims)).reshape(own.shape)
    return torch.where((maxima - values).abs() <= SUM_ERROR * x.abs().max(), given, own)
