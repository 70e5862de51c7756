"""Subclasses of torch's layers that compute as these do: tracing keeps them whole, and they become torch's own type.

torchvision's video models have such convolutions, which add a constructor and a static method.
"""

from torch import fx, nn

from qtoolkit.nn import QAT_MODULES
from qtoolkit.nn.batch_norm import BATCH_NORMS
from qtoolkit.nn.module import shallow_copy_as

FREE = {"__init__", "__module__", "__doc__", "__annotations__", "__annotate__", "__qualname__", "__constants__",
        "__static_attributes__", "__firstlineno__", "__parameters__", "extra_repr"}  # fmt: skip


def plain_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the type of torch's that a module of a subclass computes as: it overrides nothing but the constructor."""
    types = type(module).__mro__
    base = next((kind for kind in types if kind in QAT_MODULES or kind in BATCH_NORMS), None)
    if base is None or base is types[0]:
        return None
    known = {*dir(base), "__getattribute__", "__getattr__", "__call__"} - FREE
    return None if any(known & vars(kind).keys() for kind in types[: types.index(base)]) else base


def run(model: nn.Module, graph: fx.Graph, leaf_modules: tuple[type[nn.Module], ...]) -> None:
    """Make modules of such subclasses, where a graph calls them, torch's own; but for types that stay as they are."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module")
    for module in dict.fromkeys(model.get_submodule(name) for name in names if not name.endswith("training_mode")):
        base = None if isinstance(module, leaf_modules) else plain_type(module)
        if base is not None:
            replace_module(model, module, shallow_copy_as(base, module))


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in place of another, under all the names that one has."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(name, new)
