"""Shape propagation at tracing: values of a graph's nodes for example inputs, with tensors on the meta device.

A leaf module that does not run there is run on the example inputs, with the ops before it: its sizes are kept, not its values.
"""

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.utils._pytree import tree_map

from qtoolkit.model_inputs import clone_tensors, copy_containers
from qtoolkit.model_state import RandomState, deepcopy_model, device_of, values_kept

META = torch.device("meta")
PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
DEVICE_ATTRIBUTES = ("device", "is_cuda", "is_cpu", "is_meta")
UNKNOWN = object()  # a value that depends on data, or that was not computed


def is_plain(value: object, around: tuple[int, ...] = ()) -> bool:
    """Return whether a value is a number, string, dtype, device or None, or a tuple or list of those: Python may use it.

    A list that contains itself is not; `around` has the identities of what contains the value.
    """
    if not isinstance(value, tuple | list):
        return isinstance(value, PLAIN)
    return id(value) not in around and all(is_plain(item, (*around, id(value))) for item in value)


def holds_no_floats(value: object) -> bool:
    """Return whether a value is a tensor of integers, booleans or complex numbers, or a tuple or list of such tensors."""
    tensors = value if isinstance(value, tuple | list) and value else [value]
    return all(isinstance(t, Tensor) and not t.is_floating_point() for t in tensors)


def is_sequence_of_tensors(value: object) -> bool:
    """Return whether a value is a tuple or list with tensors."""
    return isinstance(value, tuple | list) and any(isinstance(t, Tensor) for t in value)


def dims_of(value: object) -> int | None:
    """Return the number of dimensions of a tensor; None for other values."""
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
        on_meta = {id(t): _on_meta(t) for t in tensors}
        self.meta_model = deepcopy_model(model, on_meta)
        self.real_tensors = {id(on_meta[id(t)]): t for t in tensors}
        self.inputs = inputs
        self.values: dict[fx.Node, object] = {}
        self.real_values: dict[fx.Node, object] = {}  # of what leads to a leaf module that needs data

    def __getitem__(self, node: fx.Node) -> object:
        return self.values.get(node, UNKNOWN)

    def add(self, node: fx.Node) -> None:
        """Compute the value of a node, if it follows from shapes alone, or if it is a call of a leaf module."""
        arguments: list[fx.Node] = node.all_input_nodes
        if any(n not in self.values for n in arguments):
            return
        random = RandomState.now()
        try:
            with torch.no_grad():
                value = self._compute_or_run(node)
            if value is not UNKNOWN:
                # Containers keep their types: code may read an attribute, as x.max(0).values. tree_map makes a Size a tuple.
                self.values[node] = value if is_plain(value) else tree_map(_on_meta, value)
        except Exception:  # it needs data, has no meta kernel, or returns a PackedSequence, which must be on the CPU
            return
        finally:
            random.restore()  # each run of a leaf module draws its own numbers

    def _compute_or_run(self, node: fx.Node) -> object:
        try:
            return self._compute(node)
        except Exception:
            if node.op != "call_module":
                raise
        value = self._run(node)
        return tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else UNKNOWN, value)

    def _run(self, node: fx.Node) -> object:
        """Return the value of a node for the example inputs, whose tensors are copied: an op may change them in place."""
        needed, waiting = {node}, [node]
        while waiting:
            found = [
                each for each in waiting.pop().all_input_nodes if each not in self.real_values and each not in needed
            ]
            self.real_values.update((each, self.values[each]) for each in found if is_plain(self[each]))
            waiting += [each for each in found if each not in self.real_values]
            needed.update(waiting)
        with values_kept([*self.real_model.buffers()]):
            for each in [each for each in node.graph.nodes if each in needed]:
                args, kwargs = copy_containers(map_aggregate((each.args, each.kwargs), self._read_real))
                self.real_values[each] = self._call(each, self.real_model, args, kwargs)
        return self.real_values[node]

    @cached_property
    def real_model(self) -> nn.Module:
        """A copy of the model with its tensors, and in its modes, which a trace replaces meanwhile."""
        return deepcopy_model(self.meta_model, dict(self.real_tensors))

    def _compute(self, node: fx.Node) -> object:
        # Functions of Python may compare devices but make no tensor on them.
        compares = getattr(node.target, "__module__", "") in ("builtins", "_operator")
        read = self._read if compares else self._read_for_meta
        args, kwargs = copy_containers(map_aggregate((node.args, node.kwargs), read))
        if node.op == "placeholder":
            return self.inputs.get(str(node.target).lstrip("*"), UNKNOWN)
        if node.op == "call_method" and node.target == "type" and len(args) == 1:  # its answer names the device
            return torch.empty(0, dtype=args[0].dtype, device=self.device).type()
        if node.target is getattr and isinstance(args[0], Tensor) and args[1] in DEVICE_ATTRIBUTES:
            return getattr(torch.empty(0, device=self.device), args[1])
        return self._call(node, self.meta_model, args, kwargs)

    def _call(self, node: fx.Node, model: nn.Module, args: Any, kwargs: Any) -> object:
        target: Any = node.target
        match node.op:
            case "placeholder":
                return clone_tensors(self.inputs[target.lstrip("*")])
            case "get_attr":
                return attrgetter(target)(self.model)
            case "call_module":
                return model.get_submodule(target)(*args, **kwargs)
            case "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _read_real(self, value: Argument) -> Any:
        return self.real_values[value] if isinstance(value, fx.Node) else value

    def _read(self, value: Argument) -> Any:
        return self.values[value] if isinstance(value, fx.Node) else value

    def _read_for_meta(self, value: Argument) -> Any:
        value = self._read(value)
        return META if isinstance(value, torch.device) else value


def _on_meta(value: object) -> object:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(META), value.requires_grad)
    return value.to(META) if isinstance(value, Tensor) else value
