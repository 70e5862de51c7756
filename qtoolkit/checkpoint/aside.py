"""Loading of parameters without a copy of what they had: their memory is written last, when nothing can fail any more."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtoolkit.model_state import values_unchanged_on_error


def copy_each(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, one after another."""
    for tensor, value in zip(to, values, strict=True):
        tensor.copy_(value)


# torch's own, not documented, copies in one call, which Ctrl-C does not interrupt.
COPY = getattr(torch, "_foreach_copy_", copy_each)


@contextmanager
def loaded_aside(model: nn.Module, loaded: dict[str, Tensor]) -> Iterator[None]:
    """Let parameters have the memory of their loaded values in a `with` block, and copy these into their own at its end.

    In the block `load_state_dict(loaded)` finds these values loaded, and hooks of modules see them. If the block raises, the
    parameters get their own memory back, into which nothing was written. Parameters of another type, device or shape than
    their values are copied before the block, and restored.
    """
    aside: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by the identity of the value: one value is aside once
    others = []
    for name, parameter in model.named_parameters():
        value = loaded.get(name)
        if value is not None and id(value) not in aside and _can_take(parameter, value):
            aside[id(value)] = parameter, value
        else:
            others.append(parameter)
    own = [(parameter, parameter.detach()) for parameter, _ in aside.values()]
    with values_unchanged_on_error(others):
        try:
            for parameter, value in aside.values():
                parameter.data = value
            loaded.update({name: aside[id(v)][0] for name, v in loaded.items() if id(v) in aside})
            yield
        except BaseException:
            for parameter, memory in own:
                parameter.data = memory
            raise
    kept = [(parameter, memory) for parameter, memory in own if _can_take(parameter, memory)]
    if not kept:
        return
    with torch.no_grad():
        COPY([memory for _, memory in kept], [parameter.detach() for parameter, _ in kept])
    for parameter, memory in kept:
        parameter.data = memory


def _can_take(parameter: Tensor, value: Tensor) -> bool:
    plain = type(parameter) is nn.Parameter and type(value) is Tensor
    return plain and (parameter.shape, parameter.dtype, parameter.device) == (value.shape, value.dtype, value.device)
