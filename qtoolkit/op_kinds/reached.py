"""The nodes that can be reached in a graph, without recursion: graphs are deeper than Python's stack."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

N = TypeVar("N")


def reached(starts: Iterable[N], following: Callable[[N], Iterable[N]]) -> Iterator[N]:
    """Yield nodes and all that they lead to, each once; `following` returns where one leads."""
    waiting, seen = list(starts), set[N]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += following(node)
