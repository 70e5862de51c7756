"""Errors for unknown names, which suggest the nearest known name."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Return a sentence for an unknown name, with the nearest known one.

    Example:
        >>> unknown("backend", "tensort", ["tensorrt", "onnxruntime"])
        "unknown backend 'tensort'; did you mean 'tensorrt'? Known: onnxruntime, tensorrt."
    """
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join(names)}."


def check_known(what: str, name: object, known: Iterable[str]) -> None:
    """Raise ValueError, with the sentence of `unknown`, unless the name is known."""
    names = list(known)
    if name not in names:
        raise ValueError(unknown(what, name, names))
