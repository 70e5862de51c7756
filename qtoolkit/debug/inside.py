"""Calls of the layers inside leaf modules, which the graph does not contain, recorded by hooks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import clone_tensors
from qtoolkit.model_state import removing
from qtoolkit.verdicts import Status


class Call(NamedTuple):
    """One call of a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


Calls = dict[str, list[Call]]


def quantized_inside(gm: QuantizedGraphModule) -> list[str]:
    """Return the dotted names of the quantized layers inside leaf modules."""
    inside = {} if gm.plan is None else gm.plan.inside
    return [name for name, verdict in inside.items() if verdict.status is Status.QUANTIZED]


@contextmanager
def watching(model: nn.Module, names: Sequence[str]) -> Iterator[Calls]:
    """Record the calls of submodules for the duration of a `with` block."""
    calls: Calls = defaultdict(list)
    handles = [
        model.get_submodule(name).register_forward_hook(partial(_note, calls[name]), with_kwargs=True) for name in names
    ]
    with removing(handles):
        yield calls


def _note(calls: list[Call], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    calls.append(Call(clone_tensors(args), clone_tensors(kwargs), clone_tensors(output)))
