"""What tests with damaged data share. `make fuzz` sets FUZZ, which multiplies their examples."""

import os
from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st

LONGER = int(os.environ.get("FUZZ", "1"))
SPLICED = [
    b"null",
    b"1e999",
    b"-1",
    b"[]",
    b"{}",
    b"9" * 5000,
    b'"\xff"',
    b"NaN",
    b"true",
    b"\0",
    b"\n",
    b" ",
    b":",
    b'"x"',
]

Change = tuple[int, bytes, int]


def examples(number: int) -> Callable:
    """Return settings of hypothesis for a test with this number of examples in the gate."""
    return settings(max_examples=number * LONGER, deadline=None)


def changes(most: int = 4) -> st.SearchStrategy[list[Change]]:
    """Draw places, what is written there, and how many bytes it replaces."""
    pieces = st.binary(min_size=1, max_size=2) | st.sampled_from(SPLICED)
    return st.lists(st.tuples(st.integers(0, 1 << 20), pieces, st.integers(0, 9)), min_size=1, max_size=most)


def changed(data: bytes, drawn: Sequence[Change], end: int | None = None) -> bytes:
    """Return data with changes, cut off at a place."""
    for place, piece, length in drawn:
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + length :]
    return data if end is None else data[: end % (len(data) + 1)]
