"""Recipe: how to build one model of the zoo, and which of its submodules are prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """One model.

    Attributes:
        name: "package/model".
        family: The section of the table that lists it.
        build: Builds it with random weights.
        inputs: Creates the arguments of its forward.
        skip: The `untraced` argument of `prepare`, as fnmatch patterns: "blocks.*.attn".
        parts: Submodules to prepare separately if the model's forward cannot be traced; () prepares the model.
        note: A remark for the table.
        exporter: The exporter of torch that writes the ONNX file.
        clip: Maximum norm of the gradients in the training step; None does not clip.
        training: Whether the model is prepared in training mode.
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
    training: bool = True


def images(side: int) -> tuple[Any, ...]:
    """Return two square images as the arguments of a forward."""
    return (torch.rand(2, 3, side, side),)
