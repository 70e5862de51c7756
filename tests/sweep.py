"""Select the cases of a parametrized test that the default run takes; `pytest --sweep` takes all, `pytest --few` one.

`@pytest.mark.sweep(1)` keeps few cases that together contain every value of every parameter.
`@pytest.mark.sweep(2)` keeps few cases that together contain every pair of values: each dtype with each layout, for example.
`@pytest.mark.sweep`, on a test or a parameter, keeps none. With --few, every other test keeps one case, marked or not.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest

COMMON = ("tensorrt", "onnxruntime", "openvino", "litert")


def slow_but(values: Iterable, quick: object) -> list:
    """Values of a parameter that are all marked slow, but one; those that have marks of their own stay as they are."""
    values = list(values)
    assert quick in values
    marked = type(pytest.param())
    return [v if v == quick or isinstance(v, marked) else pytest.param(v, marks=pytest.mark.slow) for v in values]


def values_of(item: pytest.Item) -> tuple:
    """The name, type and value of each parameter of a case."""
    parameters = sorted(item.callspec.params.items()) if hasattr(item, "callspec") else ()
    return tuple((name, type(v), v if is_hashable(v) else repr(v)) for name, v in parameters)


def is_hashable(value: object) -> bool:
    """Whether a value has a hash: a frozen dataclass has none where one of its fields has none."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def covering(cases: Mapping[str, tuple], strength: int) -> set[str]:
    """Names of few cases that together contain all combinations of `strength` values of the given cases; of one case for 0."""
    covers = {name: set(combinations(cases[name], strength)) for name in sorted(cases, key=shuffled)}
    missing, kept = set().union(*covers.values()), set()
    for most in range(max(map(len, covers.values())), 0, -1):  # greedy: the cases that add most come first
        for name, combined in covers.items():
            if len(combined & missing) == most:
                kept.add(name)
                missing -= combined
    return kept


def shuffled(name: str) -> int:
    """A sort key without a pattern, the same in every run: it spreads ties over all values."""
    return zlib.crc32(name.encode())


def left_out(items: Iterable[pytest.Item], few: bool) -> set[str]:
    """Ids of the cases that the default run leaves out, or the run with --few."""
    names, sweeps = set(), defaultdict(dict)
    for item in items:
        strengths = [mark.args for mark in item.iter_markers("sweep")]
        if () in strengths:
            names.add(item.nodeid)
        elif few or strengths:
            strength, values = 0 if few else strengths[0][0], values_of(item)
            assert strength <= len(values), f"{item.nodeid}: sweep({strength}) needs as many parameters"
            sweeps[item.nodeid.partition("[")[0], strength][item.nodeid] = values
    return names.union(*(cases.keys() - covering(cases, strength) for (_, strength), cases in sweeps.items()))


def common_first(backends: Iterable[str]) -> list[Any]:
    """Backends as the values of a parameter, of which the default run takes the common ones: for tests of what all share."""
    return [name if name in COMMON else pytest.param(name, marks=pytest.mark.sweep) for name in backends]
