"""Checks of arguments, warnings, and the words of errors: for unknown names the nearest known one, the article of a name."""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar

# Top-level packages whose frames are between the user's line and a warning. Code that torch.fx generates has no name.
BETWEEN = {"qtoolkit", "qtoolkit_command", "torch", "contextlib", "functools", "importlib", ""}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost frame that is neither of the package, nor of torch, nor of generated code."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)


def unknown(what: str, name: object, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return a sentence for an unknown name, with the nearest known one, or the meaning of a name of other tools (`meant`)."""
    names = sorted(known)
    near = (meant or {}).get(str(name).lower()) or nearest(name, names)
    hint = "." if near is None else f"; did you mean {near!r}?"
    return f"unknown {what} {name!r}{hint} Known: {', '.join(names)}."


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, without its full stop; the name of its type if it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def nearest(name: object, known: Sequence[str]) -> str | None:
    """Return the known name that is most like another one, or None."""
    node = _as_node(str(name))
    same = [each for each in known if _as_node(each) == node]
    longer = [each for each in known if len(node) > 2 and _as_node(each).startswith(node)]
    return next(iter(same or longer or get_close_matches(str(name), known, n=1, cutoff=0.5)), None)


def some(items: Sequence[str], most: int = 5) -> str:
    """Return the first items, and how many more there are: "a, b and 1 more"."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def with_article(named: object) -> str:
    """Return the name of a type, or the text of anything else such as an op kind, with "a" or "an" before it.

    Example:
        >>> with_article("conv"), with_article("embedding"), with_article(int), with_article("LSTMCell"), with_article("UNet")
        ('a conv', 'an embedding', 'an int', 'an LSTMCell', 'a UNet')
    """
    name = named.__name__ if isinstance(named, type) else str(named)
    return f"{'an' if _BEGINS_WITH_A_VOWEL.match(name) else 'a'} {name}"


def shown(value: object) -> str:
    """Return a number, a string, a type or None as it is written, and any other value by its type: it may be a whole model."""
    return repr(value) if isinstance(value, int | float | str | type | None) else with_article(type(value))


# A vowel that is heard: of a word (OrderedDict, upsample_linear), or of a letter read by its name (LSTM, MLP, but UNet).
_BEGINS_WITH_A_VOWEL = re.compile(r"[aeioAEIO]|u|U[a-z]|[FHLMNRSX][A-Z](?![a-z])")


def _as_node(name: str) -> str:
    """Return the name that torch.fx gives to the node of a module, without its leading underscore."""
    return name.replace(".", "_").strip("_")


def check_known(what: str, name: object, known: Iterable[str], meant: Mapping[str, str] | None = None) -> None:
    """Raise ValueError, with the sentence of `unknown`, unless the name is known."""
    names = list(known)
    if name not in names:
        raise ValueError(unknown(what, name, names, meant))


def type_beside(value: object, wanted: type) -> str:
    """Return the name of a value's type, with its module where it has the name of the type that is wanted."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}" if kind.__name__ == wanted.__name__ else kind.__name__


def check_mapping(what: str, value: object) -> Mapping[str, object]:
    """Return a value read from a file, or raise ValueError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a mapping of names to values, got {type(value).__name__}.")
    return value


def check_sequence(value: object, what: str, argument: str, of: str = "names", empty: bool = True) -> None:
    """Raise TypeError for one string, None or another value in place of a sequence; ValueError if it must not be empty."""
    if isinstance(value, str):
        raise TypeError(
            f"{what}: {argument} must be a sequence of {of}, got the string {value!r}; write {argument}=[{value!r}]."
        )
    if not isinstance(value, Iterable):
        remedy = f"; write {argument}=[] for none" if empty else ""
        raise TypeError(f"{what}: {argument} must be a sequence of {of}, got {shown(value)}{remedy}.")
    if not empty and not list(value):
        raise ValueError(f"{what}: {argument} must be a sequence of at least one of the {of}, got {value!r}.")


def check_flags(what: str, **flags: object) -> None:
    """Raise TypeError, which begins with `what`, unless each argument is True or False: the text "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{what}: {name} must be True or False, got {shown(value)}; write {name}=True or {name}=False."
            )


def check_whole(what: str, name: str, value: object, least: int, otherwise: str = "") -> int:
    """Return an argument of the public function `what` that is a whole number of at least `least`; True and 2.0 are refused.

    `otherwise` names other values that the argument may have, as the error says it, such as " or None". Raises TypeError
    unless it is a whole number, ValueError for less.
    """
    if type(value) is not int:
        raise TypeError(f"{what}: {name} must be a whole number{otherwise}, got {shown(value)}.")
    if value < least:
        raise ValueError(f"{what}: {name} must be at least {least}, got {value}.")
    return value


@contextmanager
def within(place: str) -> Iterator[None]:
    """Begin a ValueError of the block with the place in a file that it is about, such as object_type[0].activation."""
    try:
        yield
    except PlacedError as error:
        raise PlacedError(f"{place}.{error.place}", error.reason) from None
    except ValueError as error:
        raise PlacedError(place, str(error)) from None


class PlacedError(ValueError):
    """A value of a file is wrong, for this reason, at this place in the file."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


T = TypeVar("T")


def present(value: T | None, what: str) -> T:
    """Return a value that should have been set; TypeError if it is None."""
    if value is None:
        raise TypeError(f"{what} is missing.")
    return value
