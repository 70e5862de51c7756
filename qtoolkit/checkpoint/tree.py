"""Values of Python as JSON, with their tensors beside them: nothing in a checkpoint is a pickle."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

PLAIN = (str, int, float, bool, type(None))


def encode(value: Any, where: str, keep: Callable[[Tensor], str] | None = None) -> Any:
    """Return a value as JSON: numbers, strings, None and tensors, in lists, tuples, dicts and Counters.

    `where` says what the value is; `keep` stores a tensor and returns its key. Raises TypeError for an object of another type,
    and for a tensor without `keep`.

    Example:
        >>> encode({"betas": (0.9, 0.99)}, "options")
        {'dict': [['betas', {'tuple': [0.9, 0.99]}]]}
        >>> decode(_)
        {'betas': (0.9, 0.99)}
    """
    if isinstance(value, Tensor):
        if keep is None:
            raise TypeError(f"save_checkpoint: {where} holds a tensor; register it as a buffer.")
        return {"tensor": keep(value)}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [encode(item, where, keep) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(k, where, keep), encode(v, where, keep)] for k, v in value.items()]}
    raise TypeError(
        f"save_checkpoint: {where} holds a {type(value).__name__}; a checkpoint holds numbers, strings, None and tensors, in "
        f"lists, tuples and dicts. Leave it out of the state, or convert it."
    )


def decode(tree: Any, take: Callable[[str], Any] | None = None) -> Any:
    """Return the value of `encode`'s result, or raise ValueError; `take` returns the tensor of a key."""
    if isinstance(tree, PLAIN):
        return tree
    if isinstance(tree, list):
        return [decode(item, take) for item in tree]
    if isinstance(tree, dict) and len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind == "tensor":
            if take is None:
                raise ValueError(f"its record names the tensor {str(content)!r} in a place that has none")
            return take(content)
        if kind == "tuple":
            return tuple(decode(item, take) for item in content)
        if kind in ("dict", "counter"):
            items = {decode(key, take): decode(item, take) for key, item in content}
            return items if kind == "dict" else Counter(items)
    raise ValueError(f"its record has a value that no checkpoint has: {str(tree)[:60]}")
