"""Calls of layers into which torch.export does not look: each is one node of its program, with all arguments and results."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import (
    GetAttrKey,
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from qtoolkit.errors import present

_library = torch.library.Library("qtoolkit_capture", "DEF")  # type: ignore[no-untyped-call]
_library.define("layer(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass
class CapturedLayerCall:
    """A call of a layer while torch.export runs: torch sees its tensors and sizes, and this object holds the rest."""

    path: str  # of the layer
    compute: Callable[..., object]
    arguments: list[object]  # the leaves of the positional and keyword arguments
    spec: TreeSpec
    outputs: list[object] = field(default_factory=list)  # the leaves of the result
    output_spec: TreeSpec | None = None
    places: list[KeyPath] = field(default_factory=list)  # of the tensors among these leaves

    def run(self, tensors: Sequence[object], sizes: Sequence[object]) -> list[Tensor]:
        """Call the layer with fake tensors; return new tensors, of which none is an input."""
        args, kwargs = self.given(tensors, sizes)
        with_paths, self.output_spec = tree_flatten_with_path(self.compute(*args, **kwargs))
        self.outputs = [value for _, value in with_paths]
        self.places = [path for path, value in with_paths if isinstance(value, Tensor)]
        return [value.clone() for value in self.outputs if isinstance(value, Tensor)]

    def given(self, tensors: Sequence[object], sizes: Sequence[object]) -> Any:
        """Return the arguments, with other tensors and sizes."""
        return tree_unflatten(_replaced(self.arguments, tensors, sizes), self.spec)

    def result(self, tensors: Sequence[object]) -> object:
        """Return the result, with other tensors."""
        spec = present(self.output_spec, f"the result of {self.path!r}")
        return tree_unflatten(_replaced(self.outputs, tensors, ()), spec)


_calls: ContextVar[list[CapturedLayerCall]] = ContextVar("calls")
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def _run(call: int, tensors: Sequence[Tensor], sizes: Sequence[object]) -> list[Tensor]:
    token = _inside.set(True)
    try:
        return _calls.get()[call].run(tensors, sizes)
    finally:
        _inside.reset(token)


torch.library.register_fake("qtoolkit_capture::layer", _run, lib=_library)


@contextmanager
def called_as_layers(layers: Mapping[nn.Module, str]) -> Iterator[list[CapturedLayerCall]]:
    """Let each call of some modules, given with their paths, be one op in a block, unless another of them makes it."""
    calls: list[CapturedLayerCall] = []
    token = _calls.set(calls)
    for layer, path in layers.items():
        # `__call__` looks up `_call_impl` on the module, so that this replaces the call of this one, with its hooks.
        vars(layer)["_call_impl"] = _call_of(layer, path)
    try:
        yield calls
    finally:
        _calls.reset(token)
        for layer in layers:
            del vars(layer)["_call_impl"]


def _call_of(layer: nn.Module, path: str) -> Callable[..., object]:
    compute: Callable[..., object] = layer._call_impl

    def call(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_dynamo_compiling() or _inside.get():  # as the branches of torch.cond are
            return compute(*args, **kwargs)
        arguments, spec = tree_flatten((args, kwargs))
        calls, made = _calls.get(), CapturedLayerCall(path, compute, arguments, spec)
        calls.append(made)
        tensors, sizes = ([value for value in arguments if isinstance(value, kind)] for kind in (Tensor, torch.SymInt))
        return made.result(torch.ops.qtoolkit_capture.layer(len(calls) - 1, tensors, sizes))

    return call


def _replaced(leaves: Sequence[object], tensors: Sequence[object], sizes: Sequence[object]) -> list[object]:
    of_tensors, of_sizes = iter(tensors), iter(sizes)
    return [
        next(of_tensors) if isinstance(leaf, Tensor) else next(of_sizes) if isinstance(leaf, torch.SymInt) else leaf
        for leaf in leaves
    ]


def call_layers(graph: fx.Graph, calls: Sequence[CapturedLayerCall]) -> None:
    """Replace these ops of a graph by calls of the layers."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.qtoolkit_capture.layer.default):
        index, tensors, sizes = node.args
        call = calls[index]
        args, kwargs = call.given(tensors, sizes)
        with graph.inserting_before(node):
            layer = graph.create_node("call_module", call.path, args, kwargs)
            layer.meta.update(node.meta)
            for item in list(node.users):
                found = _item(layer, call.places[item.args[1]])
                found.meta.update(item.meta)
                item.replace_all_uses_with(found)
                graph.erase_node(item)
        graph.erase_node(node)


def _item(node: fx.Node, path: KeyPath) -> fx.Node:
    """Return the node of an item of a layer's result."""
    for key in path:
        match key:
            case GetAttrKey(name):
                item = node.graph.call_function(getattr, (node, name))
            case SequenceKey(place) | MappingKey(place):
                item = node.graph.call_function(operator.getitem, (node, place))
            case _:
                raise TypeError(f"{node.target} returns a container that is not known to torch.fx.")
        item.meta.update(node.meta)
        node = item
    return node
