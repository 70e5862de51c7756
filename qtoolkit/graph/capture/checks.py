"""Checks of what a graph would lose without an error: hooks of modules, and tensors that a forward assigns."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING
from qtoolkit.op_kinds.rules import CASTS

# The module whose hooks give the values of submodules to the forward that calls them, which a graph records.
CAPTURING = "transformers.utils.output_capturing"

# Reductions of tests of values, such as torch.isfinite(x).all(), and what they give where all values are finite.
FINITE_CHECKS = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}


def check_hooks(module: nn.Module) -> None:
    """Raise RuntimeError for a module with forward hooks: they would run once, on proxies, and then be lost."""
    hooks = [hook for name in ("_forward_hooks", "_forward_pre_hooks") for hook in vars(module)[name].values()]
    if any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks):
        raise RuntimeError(
            f"this module has forward hooks, which a graph does not record; remove them first, those of torch.nn.utils.prune "
            f"by prune.remove, or {WITHOUT_TRACING}."
        )


def is_finite_check(node: fx.Node) -> bool | None:
    """Return what a test of values gives if they are finite; None for a node that is no such test."""
    tested = node.args[0] if node.args else None
    if not isinstance(tested, fx.Node):
        return None
    return FINITE_CHECKS.get((_name_of(node), _name_of(tested)))


def _name_of(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


class Assignments:
    """The attributes of a model's submodules before a trace, whose forward may assign traced values to them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = [
            (f"{name}.{attribute}".removeprefix("."), kind, space, attribute, value)
            for name, kind, space in _spaces(model)
            for attribute, value in space.items()
        ]
        self.spaces = [(space, set(space)) for _, _, space in _spaces(model)]

    def check(self) -> None:
        """Raise RuntimeError if a traced value was assigned to a tensor that the next forward would read.

        A cast of the tensor itself is a local value: each forward makes it anew.
        """
        for name, kind, space, attribute, value in self.before:
            assigned = space.get(attribute)
            if isinstance(value, Tensor) and isinstance(assigned, fx.Proxy) and not _is_cast_of(name, assigned.node):
                raise RuntimeError(
                    f"the forward assigns to {kind} {name!r}, which a graph does not record; write into the {kind} with copy_ "
                    f"or add_, or assign to a local variable."
                )

    def undo(self) -> None:
        """Give attributes with traced values the values that they had."""
        for _, _, space, attribute, value in self.before:
            if isinstance(space.get(attribute), fx.Proxy):
                space[attribute] = value
        for space, known in self.spaces:
            for attribute in [
                name for name, value in space.items() if isinstance(value, fx.Proxy) and name not in known
            ]:
                del space[attribute]


def _spaces(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # a leaf module
            yield name, "attribute", vars(module)
            yield name, "buffer", module._buffers
            for attribute, value in vars(module).items():
                if type(value) is dict and not attribute.startswith("_"):  # a cache, which a forward may fill
                    yield f"{name}.{attribute}".removeprefix("."), "entry", value


def _is_cast_of(name: str, node: fx.Node) -> bool:
    while node.op == "call_method" and node.target in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr" and node.target == name
