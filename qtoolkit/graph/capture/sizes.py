"""Sizes at tracing: what a graph's nodes give for example inputs on the meta device, where tensors have shapes, no values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from qtoolkit.model_state import copy_model

META = torch.device("meta")


class Unknown:
    """What stands for a value that depends on data, or that no one has computed."""


UNKNOWN = Unknown()
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name, a type, or a tuple of such: something that Python may decide on."""
    return all(map(is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, PLAIN)


class Sizes:
    """The values of a graph's nodes, one by one as they are made. They never look at data, and never touch the model.

    Args:
        model: The model that is traced.
        inputs: Example values of the arguments of its forward, by name.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model = model
        tensors = [*model.parameters(), *model.buffers()]
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        # The copy's parameters and buffers are on the meta device from the start: no memory, and nothing to spoil.
        self.shadow = copy_model(model, {id(t): _on_meta(t) for t in tensors})
        self.inputs = inputs
        self.values: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        return self.values.get(node, UNKNOWN)

    def add(self, node: fx.Node) -> None:
        """Compute a node's value, if it can be told from shapes alone."""
        arguments: list[fx.Node] = node.all_input_nodes
        if any(n not in self.values for n in arguments):
            return
        try:
            with torch.no_grad():
                value = self._compute(node)
        except Exception:  # data is needed, or an op has no shapes of its own: the value is not known
            return
        if value is not UNKNOWN:
            self.values[node] = map_aggregate(value, _on_meta)

    def _compute(self, node: fx.Node) -> Any:
        target: Any = node.target
        plain = getattr(target, "__module__", "") in (
            "builtins",
            "_operator",
        )  # these look at a device, and make no tensor
        args, kwargs = with_own_lists(
            map_aggregate((node.args, node.kwargs), self._read if plain else self._read_for_meta)
        )
        if node.op == "placeholder":
            return self.inputs.get(target.lstrip("*"), UNKNOWN)
        if node.op == "get_attr":
            return _attribute(self.model, target)
        if node.op == "call_module":
            return self.shadow.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if target is getattr and isinstance(args[0], Tensor) and args[1] in ("device", "is_cuda", "is_cpu", "is_meta"):
            return getattr(torch.empty(0, device=self.device), args[1])
        return target(*args, **kwargs)

    def _read(self, value: Any) -> Any:
        return self.values[value] if isinstance(value, fx.Node) else value

    def _read_for_meta(self, value: Any) -> Any:
        value = self._read(value)
        return META if isinstance(value, torch.device) else value


def with_own_lists(value: Any) -> Any:
    """Return a value with lists and dicts of its own: those in a graph refuse what a function may do to its arguments."""
    if type(value) is tuple:
        return tuple(map(with_own_lists, value))
    if isinstance(value, list):
        return list(map(with_own_lists, value))
    return {key: with_own_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def _attribute(model: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def _on_meta(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(META), value.requires_grad)
    return value.to(META) if isinstance(value, Tensor) else value
