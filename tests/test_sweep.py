"""The default run takes few cases of a sweep, which contain all values or pairs; --sweep takes all."""

from itertools import combinations, product

import pytest

from tests.sweep import covering

CASES = {"-".join(map(str, case)): tuple(enumerate(case)) for case in product(range(7), "abcde", (False, True), "xyz")}


def combined(names, strength: int) -> set:
    return {c for name in names for c in combinations(CASES[name], strength)}


@pytest.mark.parametrize(("strength", "fewest"), [(0, 1), (1, 7), (2, 35), (3, 105), (4, 210)])
def test_all_combinations_occur_in_few_cases(strength: int, fewest: int) -> None:
    kept = covering(CASES, strength)
    assert combined(kept, strength) == combined(CASES, strength)
    assert fewest <= len(kept) <= 1.3 * fewest
    assert kept == covering(dict(reversed(CASES.items())), strength)


SUITE = """
    import dataclasses
    import pytest

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        values: list

    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("a", [[1], [2], Frozen([3])])
    @pytest.mark.parametrize("b", [0, False, "0"])
    def test_values(a, b): pass

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("a", [1, 2])
    @pytest.mark.parametrize("b", [1, 2])
    def test_pairs(a, b): pass

    @pytest.mark.sweep
    def test_full_run_only(): pass

    @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.sweep)])
    def test_parameter(a): pass

    @pytest.mark.slow
    @pytest.mark.parametrize("a", [1, 2])
    def test_slow(a): pass
"""


FEW = ("--few", "-m", "not slow")


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ((), 3 + 4 + 1 + 2),
        (("--few",), 1 + 1 + 1 + 1),
        (FEW, 1 + 1 + 1),
        (("--rest",), 2 + 3 + 0 + 2),
        (("--sweep",), 9 + 4 + 1 + 2 + 2),
    ],
)
def test_what_runs(pytester: pytest.Pytester, options: tuple, run: int) -> None:
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers = slow\n    sweep(strength)")
    pytester.makepyfile(SUITE)
    pytester.runpytest_inprocess("-p", "no:xdist", *options).assert_outcomes(passed=run, deselected=18 - run)


def test_what_starts_too_late_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_runtest_setup")
    pytester.makepyfile("def test_one(): pass")
    ran = pytester.runpytest_inprocess("-p", "no:xdist", "-ra", "--seconds=0")
    ran.assert_outcomes(skipped=1)
    ran.stdout.fnmatch_lines("*no time is left; make test-all runs it*")
