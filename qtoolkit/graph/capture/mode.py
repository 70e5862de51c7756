"""Training modes in a graph: where a forward passes on `self.training`, the graph reads the mode at each run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from torch import fx, nn

from qtoolkit.model_state import evaluating
from qtoolkit.op_kinds.recorded import TrainingMode

NAME = "training_mode"


class BranchesOnModeError(Exception):
    """Python branches on the mode of a submodule that can be a leaf module instead."""


class Mode(int):
    """The flag `training` of a submodule while it is traced, with a reference to the submodule.

    Attributes:
        module: The submodule.
        on_branch: Called with the submodule where Python branches on the flag.
    """

    module: nn.Module
    on_branch: Callable[[nn.Module], None]

    @classmethod
    def of(cls, module: nn.Module, on_branch: Callable[[nn.Module], None]) -> Self:
        """Return the mode of a submodule."""
        mode = cls(module.training)
        mode.module, mode.on_branch = module, on_branch
        return mode

    def __bool__(self) -> bool:
        self.on_branch(self.module)
        return self != 0


@contextmanager
def traced_modes(model: nn.Module, on_branch: Callable[[nn.Module], None]) -> Iterator[None]:
    """Make `training` of each submodule a Mode in a block."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        vars(module)["training"] = Mode.of(module, on_branch)
    try:
        yield
    finally:
        for module, training in before:
            vars(module)["training"] = training


def has_no_state(module: nn.Module) -> bool:
    """Return whether a module has no parameters, buffers and submodules."""
    return not (module._parameters or module._buffers or module._modules)


def returns_input(module: nn.Module) -> bool:
    """Return whether a module without state returns its input in eval mode, as those of dropouts and stochastic depth do."""
    something = object()
    with evaluating(module):
        try:
            return module.forward(something) is something
        except Exception:  # it computes
            return False


def name_in(module: nn.Module) -> str:
    """Return the name for a TrainingMode in a module: the one that is there, or a name that no other submodule has."""
    name = NAME
    while not isinstance(module._modules.get(name, TrainingMode()), TrainingMode):
        name += "_"
    return name


def add_modes(model: nn.Module, graph: fx.Graph, modes: Mapping[nn.Module, fx.Node]) -> None:
    """Add a TrainingMode to each submodule whose mode a graph reads.

    Args:
        model: The model, which is changed.
        graph: Its graph.
        modes: The node that reads the mode of each submodule.
    """
    nodes = set(graph.nodes)
    for node in modes.values():
        if node in nodes:
            owner, _, name = str(node.target).rpartition(".")
            module = model.get_submodule(owner)
            module.register_module(name, TrainingMode().train(module.training))
