"""Recipe: how to build one model of the zoo, and which of its submodules are prepared."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

Inputs = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """One model.

    Attributes:
        name: "package/model".
        family: The section of the table that lists it.
        build: Builds it with random weights.
        inputs: Creates the arguments of its forward: a tuple, or a mapping of keywords.
        skip: The `untraced` argument of `prepare`, as fnmatch patterns: "blocks.*.attn".
        parts: Submodules to prepare separately if the model's forward cannot be traced; () prepares the model.
        off: Quantizers that are turned off, as fnmatch patterns of their names in the model, as an error of the export advises.
        note: A remark for the table.
        exporter: The exporter of torch that writes the ONNX file.
        clip: Maximum norm of the gradients in a training step; None does not clip.
        training: Whether the model is prepared in training mode.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    skip: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    note: str = ""
    exporter: Literal["dynamo", "torchscript"] = "dynamo"
    clip: float | None = None
    training: bool = True


def images(side: int) -> tuple[Any, ...]:
    """Return two square images as the arguments of a forward."""
    return (torch.rand(2, 3, side, side),)


def floats(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    """Return what creates arguments of these shapes, with values between 0 and 1."""
    return lambda: tuple(torch.rand(shape) for shape in shapes)


class Entry(NamedTuple):
    """One model of a package, which is imported when the model is built.

    Attributes:
        build: Builds the model from the module of the package that has it.
        inputs: Creates the arguments of its forward.
        options: Further attributes of its recipe.
    """

    build: Callable[[Any], nn.Module]
    inputs: Callable[[], Inputs]
    options: Mapping[str, Any] = {}


def recipes_of(package: str, module: str, entries: Mapping[str, Entry]) -> Iterable[Recipe]:
    """Return a recipe for each entry, or none if the package is not installed."""
    if find_spec(package) is None:
        return []
    return [
        Recipe(f"{package}/{name}", package, partial(_built, module, entry), entry.inputs, **entry.options)
        for name, entry in entries.items()
    ]


def _built(module: str, entry: Entry) -> nn.Module:
    return entry.build(import_module(module))
