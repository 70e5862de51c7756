"""Average pools with a divisor of their own, which ONNX does not have and torch's exporters drop without a word."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DIMENSIONS: Mapping[Callable[..., Any], int] = {F.avg_pool2d: 2, F.avg_pool3d: 3}


class DivisorsWritten(TorchFunctionMode):
    """Let pools with `divisor_override` be pools that divide by their window, times a factor, while exporters record a model.

    Args:
        what: The public function, with which errors begin.

    Raises:
        ValueError: Such a pool has `ceil_mode`: the windows beyond the edge would need factors of their own.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if function in DIMENSIONS:
            return self._pool(function, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _pool(
        self,
        pool: Callable[..., Tensor],
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if divisor_override is None:
            return pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise ValueError(
                f"{self.what}: an average pool with divisor_override={divisor_override} and ceil_mode=True has no form in "
                f"ONNX; pad its input by torch.nn.functional.pad, and set ceil_mode=False."
            )
        window = kernel_size if isinstance(kernel_size, tuple | list) else [kernel_size]
        factor: float = math.prod(window) ** (DIMENSIONS[pool] // len(window)) / divisor_override
        return pool(input, kernel_size, stride, padding) * factor
