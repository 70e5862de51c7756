"""Record the calls of blocks while a model is traced."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from qtoolkit.graph.block_calls import ROOT, BlockCall, Foreign, Value
from qtoolkit.graph.capture.shapes import PLAIN


class CallRecorder:
    """The calls of blocks; `open` has the indices of those that are being traced, outermost first."""

    def __init__(self) -> None:
        self.calls, self.open = [BlockCall("")], [ROOT]

    def enter(self, name: str, block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Record that a block is called."""
        values = {key: _recorded(value) for key, value in kwargs.items()}
        names = _positional_names(block, len(args))
        self.calls.append(BlockCall(name, self.open[-1], names, tuple(map(_recorded, args)), values))
        self.open.append(len(self.calls) - 1)

    def leave(self, result: object) -> None:
        """Record what the block returns."""
        call = self.open.pop()
        self.calls[call] = replace(self.calls[call], result=_recorded(result))

    def roll_back(self, count: int) -> None:
        """Forget all calls but the first `count`."""
        del self.calls[count:]
        self.open = [call for call in self.open if call < count]


def _recorded(value: Any) -> object:
    if isinstance(value, fx.Proxy):
        return Value(value.node.name)
    if type(value) in (tuple, list):
        return type(value)(map(_recorded, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _recorded(item)) for key, item in value.items())
    return value if type(value) in PLAIN else Foreign(type(value).__name__)


def _positional_names(block: nn.Module, count: int) -> tuple[str, ...]:
    known = [p.name for p in inspect.signature(block.forward).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return tuple(known[i] if i < len(known) else f"argument_{i}" for i in range(count))
