"""Shape propagation at tracing: values of a graph's nodes for example inputs, with tensors on the meta device."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.utils._pytree import tree_map

from qtoolkit.model_inputs import copy_containers
from qtoolkit.model_state import RandomState, deepcopy_model, device_of

META = torch.device("meta")
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
DEVICE_ATTRIBUTES = ("device", "is_cuda", "is_cpu", "is_meta")
UNKNOWN = object()  # a value that depends on data, or that was not computed


def is_plain(value: object) -> bool:
    """Return whether a value is a number, string, dtype, device or None, or a tuple or list of those: Python may use it."""
    return all(map(is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, PLAIN)


def holds_no_floats(value: object) -> bool:
    """Return whether a value is a tensor of integers, booleans or complex numbers, or a tuple or list of such tensors."""
    tensors = value if isinstance(value, tuple | list) and value else [value]
    return all(isinstance(t, Tensor) and not t.is_floating_point() for t in tensors)


def is_sequence_of_tensors(value: object) -> bool:
    """Return whether a value is a tuple or list with tensors."""
    return isinstance(value, tuple | list) and any(isinstance(t, Tensor) for t in value)


def dims_of(value: object) -> int | None:
    """Return the number of dimensions of a tensor; None of other values."""
    return value.dim() if isinstance(value, Tensor) else None


class ShapePropagation:
    """Values of a graph's nodes, computed as the nodes are made, without data and without touching the model.

    `inputs` are example values of the arguments of its forward, by name.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, object]) -> None:
        self.model = model
        tensors = [*model.parameters(), *model.buffers()]
        self.device = device_of(model) or torch.device("cpu")
        # The copy's parameters and buffers are on the meta device from the start, so they take no memory.
        self.meta_model = deepcopy_model(model, {id(t): _on_meta(t) for t in tensors})
        self.inputs = inputs
        self.values: dict[fx.Node, object] = {}

    def __getitem__(self, node: fx.Node) -> object:
        return self.values.get(node, UNKNOWN)

    def add(self, node: fx.Node) -> None:
        """Compute the value of a node, if it follows from shapes alone."""
        arguments: list[fx.Node] = node.all_input_nodes
        if any(n not in self.values for n in arguments):
            return
        random = RandomState.now()
        try:
            with torch.no_grad():
                value = self._compute(node)
        except Exception:  # the op needs data, or has no meta kernel: the value stays unknown
            return
        finally:
            random.restore()  # each run of a leaf module draws its own numbers
        if value is not UNKNOWN:
            # Containers keep their types: code may read an attribute, as x.max(0).values. tree_map makes a Size a tuple.
            self.values[node] = value if is_plain(value) else tree_map(_on_meta, value)

    def _compute(self, node: fx.Node) -> object:
        target: Any = node.target
        # Functions of Python may compare devices but make no tensor on them.
        compares = getattr(target, "__module__", "") in ("builtins", "_operator")
        read = self._read if compares else self._read_for_meta
        args, kwargs = copy_containers(map_aggregate((node.args, node.kwargs), read))
        if node.op == "placeholder":
            return self.inputs.get(target.lstrip("*"), UNKNOWN)
        if node.op == "get_attr":
            return attrgetter(target)(self.model)
        if node.op == "call_module":
            return self.meta_model.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method" and target == "type" and len(args) == 1:  # its answer names the device
            return torch.empty(0, dtype=args[0].dtype, device=self.device).type()
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if target is getattr and isinstance(args[0], Tensor) and args[1] in DEVICE_ATTRIBUTES:
            return getattr(torch.empty(0, device=self.device), args[1])
        return target(*args, **kwargs)

    def _read(self, value: Argument) -> Any:
        return self.values[value] if isinstance(value, fx.Node) else value

    def _read_for_meta(self, value: Argument) -> Any:
        value = self._read(value)
        return META if isinstance(value, torch.device) else value


def _on_meta(value: object) -> object:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(META), value.requires_grad)
    return value.to(META) if isinstance(value, Tensor) else value
