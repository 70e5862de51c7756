"""A model's mode in its graph: what a forward hands on of `self.training` follows the mode that the model is in at each run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import fx, nn

NAME = "training_mode"


class DecidesOnModeError(Exception):
    """Python decides on the mode in a submodule that can be kept whole instead."""


class TrainingMode(nn.Module):
    """Returns whether the submodule that it is in is in training mode."""

    def forward(self) -> bool:
        """Return the mode."""
        return self.training


class Mode(int):
    """A submodule's `training` while it is traced: the same flag, that knows where it comes from.

    Attributes:
        module: The submodule.
        decided: Called with the submodule where Python decides on the flag.
    """

    module: nn.Module
    decided: Callable[[nn.Module], None]

    @classmethod
    def of(cls, module: nn.Module, decided: Callable[[nn.Module], None]) -> Self:
        """Return a submodule's mode."""
        mode = cls(module.training)
        mode.module, mode.decided = module, decided
        return mode

    def __bool__(self) -> bool:
        self.decided(self.module)
        return self != 0


@contextmanager
def marked(model: nn.Module, decided: Callable[[nn.Module], None]) -> Iterator[None]:
    """Let the submodules' `training` be a Mode in a block."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        vars(module)["training"] = Mode.of(module, decided)
    try:
        yield
    finally:
        for module, training in before:
            vars(module)["training"] = training


def holds_nothing(module: nn.Module) -> bool:
    """Return whether a module has no parameters, buffers and submodules."""
    return not (module._parameters or module._buffers or module._modules)


def add_modes(model: nn.Module, graph: fx.Graph) -> None:
    """Put a TrainingMode into each submodule whose mode a graph reads."""
    for node in graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "call_module" and name == NAME:
            module = model.get_submodule(owner)
            module.register_module(NAME, TrainingMode().train(module.training))


def is_mode(node: fx.Node) -> bool:
    """Return whether a node reads a mode."""
    return node.op == "call_module" and str(node.target).rpartition(".")[2] == NAME
