"""Recipe: how one model of the zoo is built and what of it is prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True)
class Recipe:
    """One model.

    Attributes:
        name: Its name in the package, with the package's name before it.
        family: What the table groups it by.
        build: Makes it, with random weights.
        inputs: Makes the arguments of its forward.
        skip: Submodules that `prepare` keeps whole, as patterns of file names: "blocks.*.attn".
        parts: Submodules that are prepared each on its own, where the model's own forward cannot be traced; () is the model.
        note: What the table says besides.
        exporter: Which of torch's exporters makes the ONNX file.
        clip: The largest norm of the gradients in the training step; None leaves them as they are.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    skip: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    note: str = ""
    exporter: Literal["dynamo", "torchscript"] = "dynamo"
    clip: float | None = None
