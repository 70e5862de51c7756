"""Which cases of a sweep the default run takes; `--sweep` takes all.

`@pytest.mark.sweep(1)`: some cases, such that every value of every parameter occurs.
`@pytest.mark.sweep(2)`: such that every two values that occur together anywhere still do: each dtype in each layout, say.
`@pytest.mark.sweep`, on a test or a parameter: none.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

import pytest


def values_of(item: pytest.Item) -> tuple:
    """A case's parameters, by name, type and value."""
    parameters = sorted(item.callspec.params.items()) if hasattr(item, "callspec") else ()
    return tuple((name, type(v), v if type(v).__hash__ else repr(v)) for name, v in parameters)


def covering(cases: Mapping[str, tuple], strength: int) -> set[str]:
    """Names of few cases in which all combinations of `strength` values occur that occur in any."""
    covers = {name: set(combinations(cases[name], strength)) for name in sorted(cases, key=shuffled)}
    missing, kept = set().union(*covers.values()), set()
    for most in range(max(map(len, covers.values())), 0, -1):  # greedy: those that add most come first
        for name, combined in covers.items():
            if len(combined & missing) == most:
                kept.add(name)
                missing -= combined
    return kept


def shuffled(name: str) -> int:
    """A sorting key without a pattern: what is left to choose is spread over all values, and the same in every run."""
    return zlib.crc32(name.encode())


def left_out(items: Iterable[pytest.Item]) -> set[str]:
    """The ids of the cases that the default run leaves out."""
    names, sweeps = set(), defaultdict(dict)
    for item in items:
        strengths = [mark.args for mark in item.iter_markers("sweep")]
        if () in strengths:
            names.add(item.nodeid)
        elif strengths:
            sweeps[item.nodeid.partition("[")[0], strengths[0][0]][item.nodeid] = values_of(item)
    return names.union(*(cases.keys() - covering(cases, strength) for (_, strength), cases in sweeps.items()))
