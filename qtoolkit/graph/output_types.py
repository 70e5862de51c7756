"""Mappings with a class of their own among the results of a forward, such as ModelOutput of transformers.

A graph returns plain dicts, which all passes and exporters read. At the end of its forward, the model makes objects of them.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

# Classes by the keys that lead to them in a result, inner ones first.
OutputTypes = tuple[tuple[tuple[str, ...], type], ...]


def types_in(result: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Yield the classes of dicts that are dataclasses in a result: the fields are the entries."""
    if issubclass(type(result), dict):  # a traced value has the class of its value, and no entries
        for key, value in result.items():
            yield from types_in(value, (*path, key))
        if is_dataclass(result):
            yield path, type(result)


def returning(forward: Callable[..., object], types: OutputTypes) -> Callable[..., object]:
    """Return a forward that makes objects of these classes of the dicts that another one returns."""
    if not types:
        return forward

    @functools.wraps(forward)
    def typed(*args: object, **kwargs: object) -> object:
        result = forward(*args, **kwargs)
        for path, kind in types:
            result = _typed(result, path, kind)
        return result

    return typed


def _typed(result: Any, path: tuple[str, ...], kind: type) -> Any:
    """Return a result with an object of a class at a place; the other training mode may have nothing there."""
    if not path:
        return kind(**result)
    if path[0] in result:
        result[path[0]] = _typed(result[path[0]], path[1:], kind)
    return result
