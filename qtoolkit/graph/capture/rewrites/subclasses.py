"""Subclasses of torch's layers that compute the same: they are leaf modules of the trace, and are replaced by torch's type.

torchvision's video models have such convolutions: they add a constructor and a static method.
"""

from torch import nn

from qtoolkit.graph.capture.rewrites.both_modes import Traced
from qtoolkit.nn import QAT_MODULES
from qtoolkit.nn.batch_norm import BATCH_NORMS
from qtoolkit.nn.module import shallow_copy_as
from qtoolkit.shared_modules import replace_everywhere

FREE = {"__init__", "__module__", "__doc__", "__annotations__", "__annotate__", "__qualname__", "__constants__",
        "__static_attributes__", "__firstlineno__", "__parameters__", "extra_repr"}  # fmt: skip


def equivalent_type(module: nn.Module) -> type[nn.Module] | None:
    """Return torch's layer type if a module is of a subclass that overrides nothing but the constructor; else None."""
    types = type(module).__mro__
    base = next((kind for kind in types if kind in QAT_MODULES or kind in BATCH_NORMS), None)
    if base is None or base is types[0]:
        return None
    known = {*dir(base), "__getattribute__", "__getattr__", "__call__"} - FREE
    return None if any(known & vars(kind).keys() for kind in types[: types.index(base)]) else base


def run(traced: Traced, leaf_modules: tuple[type[nn.Module], ...]) -> None:
    """Replace the modules of such subclasses that a graph calls by torch's type, unless their type is in `leaf_modules`."""
    names = dict.fromkeys(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    for module in dict.fromkeys(map(traced.model.get_submodule, names)):
        base = None if isinstance(module, leaf_modules) else equivalent_type(module)
        if base is not None:
            replace_everywhere(traced.model, module, shallow_copy_as(base, module))
