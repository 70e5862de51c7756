"""Functions and modules that tracing puts into a graph, to run with the model."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.public import publish

# What `check_size` asks of sizes that are dynamic, and where, while an exporter records the model: the file does not ask it.
_asked: ContextVar[list[tuple[object, str]] | None] = ContextVar("asked", default=None)


@contextmanager
def sizes_asked() -> Iterator[list[tuple[object, str]]]:
    """Collect what Python asks of dynamic sizes in a `with` block: the value that an export then has, and the place."""
    asked: list[tuple[object, str]] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


class TrainingMode(nn.Module):
    """Returns whether it is in training mode, as the submodule that it belongs to is."""

    def forward(self) -> bool:
        """Return the mode."""
        return self.training


def is_mode(node: fx.Node) -> bool:
    """Return whether a node of a GraphModule reads a training mode."""
    gm = node.graph.owning_module
    return node.op == "call_module" and gm is not None and isinstance(gm.get_submodule(str(node.target)), TrainingMode)


def check_size(value: object, expected: object, where: str) -> None:
    """Raise ValueError if a value that decided a branch at tracing is another one now."""
    if not torch.compiler.is_dynamo_compiling() and isinstance(value, torch.SymInt | torch.SymBool):
        _note_asked(value, expected, where)
    if (bool(value) if isinstance(expected, bool) else value) != expected:
        raise ValueError(
            f"the model was prepared for inputs of other sizes: a value that Python uses is {value!r} now and was "
            f"{expected!r} for the example inputs, at {where}. Call qtoolkit.prepare with example_inputs of these sizes; or "
            f"with the optional tensors that forward otherwise makes itself, such as position_ids or attention_mask of a "
            f"language model, which then takes any batch; or make that submodule a leaf module with untraced."
        )


def _note_asked(value: object, expected: object, where: str) -> None:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    asked = _asked.get()
    if asked is not None and not statically_known_true(value == expected):
        asked.append((expected, where))


def check_none(value: object, message: str) -> None:
    """Raise ValueError if an argument that was fixed at None is given."""
    if value is not None:
        raise ValueError(
            f"{message}: to pass a value, give one in the example_inputs of qtoolkit.prepare, so that it stays an argument, "
            f"or quantize the model by qtoolkit.quant_modules.replace, which fixes no argument."
        )


def check_given(value: object, name: str) -> None:
    """Raise ValueError if an argument that the graph computes with is left out or None."""
    if value is None:
        raise ValueError(
            f"argument {name!r} is None: it was in the example_inputs of qtoolkit.prepare, and the graph computes with it. "
            f"Pass it, or prepare the model with example_inputs without it."
        )


def check_default(value: object, expected: object, name: str) -> None:
    """Raise ValueError if an argument that was fixed at its default has another value."""
    if value is not expected and value != expected:
        raise ValueError(
            f"argument {name!r} is {value!r}, and qtoolkit.prepare has fixed it at its default, {expected!r}. Leave it out; or "
            f"give the other value in the example_inputs of qtoolkit.prepare, or quantize the model by "
            f"qtoolkit.quant_modules.replace, which fixes no argument."
        )


def check_argument(value: object, expected: object, name: str) -> None:
    """Raise ValueError if an argument of a block is another one than the model gives it."""
    if type(value) is not type(expected) or value != expected:
        raise ValueError(
            f"argument {name!r} of this block must be {expected!r}, as when the model was prepared, which fixed it; got "
            f"{value!r}."
        )


def call_scripted(module: str, name: str, *args: object, **kwargs: object) -> object:
    """Call a function compiled by torch.jit.script, by its module and name: the function itself cannot be pickled."""
    return getattr(import_module(module), name)(*args, **kwargs)


def length_of(value: Sized) -> int:
    """Return the number of items of a value."""
    return len(value)


def items_of(value: Iterable[object]) -> list[object]:
    """Return the items of a value in order, so that they can be indexed, as a dict and its views cannot."""
    return list(value)


def set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Write into a tensor, and return it."""
    tensor[index] = value
    return tensor


def by_mode(training: bool, in_training: object, in_eval: object) -> object:
    """Return the value of training mode or of eval mode, where Python branches on the mode."""
    return in_training if training else in_eval


# Functions that are single nodes of a graph: torch.fx traces a graph again when it is unpickled, and must not run them then.
RECORDED = (check_size, check_none, check_given, check_default, call_scripted, length_of, items_of, set_item, by_mode)
# Functions that no runtime computes: checks, limits of dtypes, and those that build or take apart containers.
BOOKKEEPING = (
    check_size, check_none, check_given, check_default, length_of, items_of, by_mode, torch._assert, getattr, OrderedDict,
    torch.finfo, torch.iinfo,
)  # fmt: skip
publish("qtoolkit.graph", TrainingMode, *RECORDED)
