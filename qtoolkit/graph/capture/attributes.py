"""The attributes of a model's modules while its forward is traced: training modes and hooks.

If a forward passes on `self.training`, the graph reads the mode at each run. Hooks raise an error, since a graph would
lose them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from torch import fx, nn

from qtoolkit.graph.capture.shapes import is_plain
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING
from qtoolkit.model_state import attribute_kept, evaluating
from qtoolkit.op_kinds.recorded import TrainingMode

NAME = "training_mode"
# The module whose hooks give the values of submodules to the forward that calls them, which a graph records.
CAPTURING = "transformers.utils.output_capturing"


# ---- training modes


class BranchesOnModeError(Exception):
    """Python branches on the mode of a submodule that can be a leaf module instead."""


class Mode(int):
    """The flag `training` of a submodule while it is traced, with a reference to the submodule."""

    module: nn.Module  # the submodule
    on_branch: Callable[[nn.Module], None]  # called with the submodule where Python branches on the flag

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
    """Make `training` of each submodule a Mode in a block; `on_branch` is called with a submodule that branches on it."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        # `vars`: an assignment to an attribute of a scripted module goes to C++, which takes no Mode.
        vars(module)["training"] = Mode.of(module, on_branch)
    try:
        yield
    finally:
        for module, training in before:
            vars(module)["training"] = training


def kept_in_eval_mode(model: nn.Module) -> list[str]:
    """Return the norms and dropouts that `train()` leaves in eval mode, because classes of the model have one of their own.

    The model is unchanged, except for what a `train()` sets beside modes and `requires_grad`.
    """
    if not any(map(has_own_train, model.modules())):
        return []
    # The base classes of batch and instance norms, and of dropouts: torch has no public ones.
    by_mode = nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd
    with attribute_kept(model.modules(), "training"), attribute_kept(model.parameters(), "requires_grad"):
        try:
            model.train()
        except Exception:  # it may raise anything
            return []
        return [name for name, module in model.named_modules() if isinstance(module, by_mode) and not module.training]


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return the numbers, strings, flags and None among a module's attributes, which a graph has as they are now."""
    found = {name: value for name, value in vars(module).items() if is_plain(value) and not name.startswith("_")}
    return {name: value for name, value in found.items() if name != "training"}


def has_own_train(module: nn.Module) -> bool:
    """Return whether the class of a module, outside of torch, defines `train` or `eval`."""
    definers = (kind for kind in type(module).__mro__ if {"train", "eval"}.intersection(vars(kind)))
    return next(definers, nn.Module).__module__.partition(".")[0] != "torch"


def returns_input(module: nn.Module) -> bool:
    """Return whether a module without state returns its input in eval mode, as dropouts and stochastic depth do."""
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
    """Add a TrainingMode to each submodule of a model whose mode its graph reads, by one of the nodes `modes`."""
    nodes = set(graph.nodes)
    for node in modes.values():
        if node in nodes:
            owner, _, name = str(node.target).rpartition(".")
            module = model.get_submodule(owner)
            module.register_module(name, TrainingMode().train(module.training))


# ---- hooks


def check_hooks(module: nn.Module) -> None:
    """Raise RuntimeError for a module with forward hooks: they would run once, on proxies, and then be lost."""
    hooks = [hook for name in ("_forward_hooks", "_forward_pre_hooks") for hook in vars(module)[name].values()]
    if any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks):
        raise RuntimeError(
            f"this module has forward hooks, which a graph does not record; remove them first (for torch.nn.utils.prune "
            f"by prune.remove), or {WITHOUT_TRACING}."
        )
