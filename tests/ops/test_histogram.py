"""Running histograms against an independent oracle, exactly; searches against every candidate; observers end to end."""

import copy
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit import ops
from qtoolkit.quantizers.observers import HistogramObserver
from tests import nets, reference
from tests.cases import FLOATS, LAYOUTS, SIZES, any_tensor, assert_same, floats, generator, name_of

native = torch.ops.qtoolkit
INFINITY = float("inf")

Histogram = tuple[Tensor, Tensor, Tensor]


def empty(bins: int = 2048) -> Histogram:
    return torch.zeros(bins, dtype=torch.int64), torch.tensor(0.0), torch.tensor(0.0)


def histogram(*batches: Tensor, bins: int = 2048) -> Histogram:
    found = empty(bins)
    for x in batches:
        ops.observe_histogram_(x, *found)
    return found


def assert_equal(found: Histogram, wanted: Histogram) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


def check(x: Tensor, bins: int = 2048) -> None:
    counts, lo, hi = reference.histogram(x, bins)
    assert_equal(histogram(x, bins=bins), (torch.from_numpy(counts), torch.tensor(lo), torch.tensor(hi)))


# ---- counting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_of_every_layout(layout: str, dtype: torch.dtype) -> None:
    check(LAYOUTS[layout](floats(dtype)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_counts_of_every_size(size: int, dtype: torch.dtype) -> None:
    check(floats(dtype)(size))
    check(floats(dtype)(size).abs())


@settings(deadline=None)
@given(any_tensor(), st.sampled_from([2, 6, 1000, 2048]))
def test_counts_of_any_tensor(x: Tensor, bins: int) -> None:
    check(x, bins)


@pytest.mark.parametrize("bins", [2, 4, 6, 10, 1000, 2048, 4096, 99998])
def test_any_even_number_of_bins(bins: int) -> None:
    x = torch.randn(5000, generator=generator(0))
    for values in (x, x.relu(), -x.relu(), x.abs() + 1):
        check(values, bins)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_values_on_edges(dtype: torch.dtype) -> None:
    """Bins close towards zero; the neighbours of an edge fall on their own side of it."""
    edges = (torch.arange(-64, 65) / 16).to(dtype)
    beside = [torch.nextafter(edges, torch.tensor(end, dtype=dtype)) for end in (-9.0, 9.0)]
    check(torch.cat([edges, *beside]), 128)
    check(torch.cat([edges, *beside]).abs(), 64)


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0, 0.0],
        [0.0, 1e-45],
        [-1e-45],
        [1e-45, 3.0],
        [-1e-45, 3.0],
        [-1e-40, 1e-40],
        [-3.0, 5e-324],
        [2e-35, -2e-35],
        [8.5e37, -1.0],
        [-8.5e37],
        [1.0, 2.0, 4.0],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_extreme_values(values: list[float], dtype: torch.dtype) -> None:
    check(torch.tensor(values, dtype=dtype))
    check(torch.tensor(values, dtype=dtype), 6)
    one_by_one = histogram(*torch.tensor(values, dtype=dtype))
    assert_equal(one_by_one, histogram(torch.tensor(values, dtype=dtype)))


def test_nothing_changes_an_empty_histogram_but_data() -> None:
    assert_equal(histogram(torch.empty(0), torch.empty(3, 0)), empty())


def split(x: Tensor, how: str) -> list[Tensor]:
    if how == "sorted":
        return list(x.sort().values.split(97))
    if how == "largest first":
        return list(x[x.abs().argsort(descending=True)].split(501))
    if how == "positive first":
        return [x[x >= 0], x[x < 0]]
    return list(x.split(int(how)))


@pytest.mark.parametrize("how", ["1000", "333", "7", "sorted", "largest first", "positive first"])
@pytest.mark.parametrize("bins", [2, 30, 2048])
def test_any_split_into_batches_counts_the_same(bins: int, how: str) -> None:
    g = generator(3)
    for x in (torch.randn(3000, generator=g), torch.randn(3000, generator=g).exp() ** 3, torch.randn(3000).relu()):
        assert_equal(histogram(*split(x, how), bins=bins), histogram(x, bins=bins))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), max_size=5), max_size=6), st.sampled_from([2, 6, 64])
)
def test_any_split_of_any_values_counts_the_same(batches: list[list[float]], bins: int) -> None:
    parts = [torch.tensor(b, dtype=torch.float32) for b in batches]
    whole = torch.cat([*parts, torch.empty(0)])
    assert_equal(histogram(*parts, bins=bins), histogram(whole, bins=bins))
    check(whole, bins)


def test_growth_moves_counts_whole() -> None:
    x = torch.rand(10000, generator=generator(0))
    found = histogram(x)
    assert (found[1], found[2]) == (0, 1)
    ops.observe_histogram_(torch.tensor([1.0]), *found)
    assert (found[1], found[2]) == (0, 2)
    ops.observe_histogram_(torch.tensor([-1e6]), *found)
    assert (found[1], found[2]) == (-(2.0**20), 2.0**20)
    assert found[0].sum() == 10002
    assert found[0][1024] == 10001


def merged(a: Histogram, b: Histogram) -> Histogram:
    """By the recipe in the docstring of observe_histogram_."""
    both = [[c.clone(), float(lo), float(hi)] for c, lo, hi in (a, b)]
    if any(hi <= lo for _, lo, hi in both):
        return a if both[1][2] <= both[1][1] else b
    n = len(a[0])

    def double(h: list) -> None:
        counts, lo, hi = h
        start = n // 2 if lo < 0 else 0
        new = torch.zeros_like(counts)
        for i in range(n):
            new[start + (i - start) // 2] += counts[i]
        h[:] = new, lo * 2, hi * 2

    if (both[0][1] < 0) != (both[1][1] < 0):
        one = both[0] if both[0][1] == 0 else both[1]
        double(one)
        half = one[2] / 2
        one[:] = one[0].roll(n // 2), -half, half
    while both[0][2] != both[1][2]:
        double(min(both, key=lambda h: h[2]))
    return both[0][0] + both[1][0], torch.tensor(both[0][1]), torch.tensor(both[0][2])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_histograms_of_two_processes_merge_exactly(scale: float) -> None:
    g = generator(1)
    sources = [torch.randn(999, generator=g), torch.rand(999, generator=g) * scale, torch.empty(0)]
    for x in sources:
        for y in sources:
            wanted = histogram(x, y, bins=64)
            assert_equal(merged(histogram(x, bins=64), histogram(y, bins=64)), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_threads_count_the_same(dtype: torch.dtype) -> None:
    x = floats(dtype)(1_100_003)
    x[777] = 3000
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(histogram(x))
    finally:
        torch.set_num_threads(before)
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    assert found[0][0].sum() == x.numel()


@pytest.mark.parametrize("bad", [float("nan"), INFINITY, -INFINITY, 2.0**126, -(2.0**127)])
@pytest.mark.parametrize("place", [0, 1023, 70000, 99999])
def test_what_has_no_bin_breaks_the_histogram(bad: float, place: int) -> None:
    found = histogram(torch.ones(5))
    counts = found[0].clone()
    x = torch.ones(100000)
    x[place] = bad
    ops.observe_histogram_(x, *found)
    assert found[1].isnan()
    assert found[2].isnan()
    ops.observe_histogram_(torch.ones(5), *found)
    assert found[2].isnan()
    assert torch.equal(found[0], counts)


@pytest.mark.parametrize(("lo", "hi"), [(-1.0, 2.0), (0.5, 2.0), (0.0, 3.0), (-INFINITY, INFINITY), (0.0, INFINITY)])
def test_a_range_that_no_histogram_has_is_not_taken(lo: float, hi: float) -> None:
    found = (torch.zeros(64, dtype=torch.int64), torch.tensor(lo), torch.tensor(hi))
    ops.observe_histogram_(torch.ones(3), *found)
    assert found[1].isnan()
    assert found[0].sum() == 0
    assert all(end.isnan() for end in ops.search_range(found[0], torch.tensor(lo), torch.tensor(hi)))


def test_counts_go_beyond_32_bits() -> None:
    counts, lo, hi = histogram(torch.tensor([0.0, 1.0]))
    counts[0] = 2**40
    ops.observe_histogram_(torch.tensor([0.0, 100.0]), counts, lo, hi)
    assert counts[0] == 2**40 + 1


# ---- searching ----------------------------------------------------------------------------------------------------------


def samples(name: str) -> Tensor:
    g = generator(5)
    x = torch.randn(20000, generator=g)
    return {
        "normal": x,
        "relu": x.relu(),
        "uniform": torch.rand(20000, generator=g),
        "laplace": x.sign() * torch.rand(20000, generator=g).log(),
        "two humps": torch.where(x > 0, x * 0.1 + 2, x * 0.3 - 1),
        "outliers": torch.cat([x, torch.tensor([30.0, -11.0])]),
        "skewed": (x * 0.7).exp() - 0.2,
        "negative": -x.abs(),
        "few": x[:7],
        "two values": torch.tensor([0.25, 3.0]).repeat(50),
    }[name]


SAMPLES = ["normal", "relu", "uniform", "laplace", "two humps", "outliers", "skewed", "negative", "few", "two values"]
CODES = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (0, 15), (-2, 1)]


def searched(found: Histogram, codes: tuple[int, int], method: str, symmetric: bool, percentile: float = 99.99):
    lo, hi = ops.search_range(*found, *codes, method, percentile, symmetric)
    return lo.item(), hi.item()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("method", ["mse", "l2", "entropy"])
@pytest.mark.parametrize("name", SAMPLES)
def test_symmetric_search_finds_the_best_of_all_edges(name: str, method: str, codes: tuple[int, int]) -> None:
    found = histogram(samples(name), bins=512)
    h = reference.Bins(*found, *codes, symmetric=True)
    lo, hi = searched(found, codes, method, True)
    assert lo == (-hi if codes[0] < 0 else 0)
    if not h.candidates():
        assert hi == 0
        return
    cost = getattr(h, method)
    chosen = round(hi / h.width)
    assert chosen * h.width == hi
    costs = np.array([cost(*ends) for ends in h.candidates()])
    least = costs.min()
    assert costs[chosen - 1] <= least + 1e-9 * (h.counts * h.edges[1:] ** 2).sum() * (method != "entropy") + 1e-10


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("candidates", [[5], [200, 3, 512], range(100, 500, 37)], ids=len)
@pytest.mark.parametrize("name", SAMPLES)
def test_entropy_search_of_given_candidates(name: str, candidates: Sequence[int], codes: tuple[int, int]) -> None:
    """Candidates may span fewer bins than there are levels, or reach beyond the largest magnitude."""
    found = histogram(samples(name), bins=512)
    h = reference.Bins(*found, *codes, symmetric=True, given=candidates)
    chosen = round(ops.search_range(*found, *codes, "entropy", candidates=candidates)[1].item() / h.width)
    costs = {b: h.entropy(b, b) for b, _ in h.candidates()}
    assert costs.get(chosen, 0) <= min(costs.values(), default=0) + 1e-10
    assert chosen in candidates or not costs


@pytest.mark.parametrize("count", [3, 4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_widest_of_equal_candidates_is_chosen(count: int, seed: int) -> None:
    """With a level for each value nothing is lost by the whole range, nor by the range of the first bin that is not empty."""
    found = histogram(torch.randint(0, count, (10000,), generator=generator(seed)).float(), bins=512)
    last = int(found[0].nonzero().max()) + 1
    hi = ops.search_range(*found, 0, 127, "entropy", candidates=range(1, last + 1))[1]
    assert hi == last * found[2] / 512


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("bins", "codes", "slack"),
    [(40, (-128, 127), 1e-9), (60, (0, 255), 1e-9), (60, (-8, 7), 1e-9), (200, (-8, 7), 0.01)],
    ids=str,
)
@pytest.mark.parametrize("method", ["mse", "l2", "entropy"])
@pytest.mark.parametrize("name", SAMPLES)
def test_affine_search_finds_the_best_of_all_pairs(
    name: str, method: str, codes: tuple[int, int], bins: int, slack: float
) -> None:
    """Of few bins exactly; of many, where a step is wider than a bin, with an error at most 1 % above the least."""
    found = histogram(samples(name), bins=bins)
    h = reference.Bins(*found, *codes, symmetric=False)
    lo, hi = searched(found, codes, method, False)
    assert lo <= 0 <= hi
    cost = getattr(h, method)
    chosen = cost(round(-lo / h.width), round(hi / h.width))
    least = min(cost(*ends) for ends in h.candidates())
    assert chosen <= least * (1 + slack) + 1e-9


@pytest.mark.sweep(2)
@pytest.mark.parametrize("codes", [(-128, 127), (0, 255)], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("percent", [1.0, 50.0, 99.0, 99.99, 100.0])
@pytest.mark.parametrize("name", SAMPLES)
def test_percentile(name: str, percent: float, symmetric: bool, codes: tuple[int, int]) -> None:
    found = histogram(samples(name))
    wanted = reference.Bins(*found, *codes, symmetric=symmetric).percentile(percent)
    assert searched(found, codes, "percentile", symmetric, percent) == pytest.approx(wanted, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", ["normal", "uniform", "outliers", "laplace"])
def test_percentile_is_that_of_the_data(name: str) -> None:
    x = samples(name)
    found = histogram(x)
    width = float(found[2] - found[1]) / 2048
    wanted = np.percentile(x.abs().numpy(), 99)
    assert searched(found, (-128, 127), "percentile", True, 99.0)[1] == pytest.approx(wanted, abs=2 * width)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["mse", "l2"])
def test_least_error_is_that_of_the_data(method: str, symmetric: bool) -> None:
    """On the data itself no range is much better than the one chosen from the histogram."""
    x = samples("laplace")
    spec = qt.QuantSpec(bits=4, symmetric=symmetric)

    def error(lo: float, hi: float) -> float:
        quantizer = qt.TensorQuantizer(spec)
        quantizer.set_range(torch.tensor(lo), torch.tensor(hi))
        return (quantizer(x) - x).square().mean().item()

    chosen = error(*searched(histogram(x), (-8, 7), method, symmetric))
    most = x.abs().max().item()
    others = [error(-most * a / 50, most * a / 50) for a in range(5, 51)]
    assert chosen <= min(others) * 1.005


@pytest.mark.parametrize("method", ["percentile", "mse", "l2", "entropy"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_of_nothing_of_zeros_and_of_nan(method: str, symmetric: bool) -> None:
    assert searched(empty(), (-128, 127), method, symmetric) == (INFINITY, -INFINITY)
    assert searched(histogram(torch.zeros(9)), (-128, 127), method, symmetric) == (0, 0)
    assert np.isnan(searched(histogram(torch.tensor([1.0, torch.nan])), (-128, 127), method, symmetric)).all()


@pytest.mark.parametrize("method", ["percentile", "mse", "l2", "entropy"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_channels_are_searched_one_by_one(method: str, symmetric: bool) -> None:
    each = [histogram(samples(name)) for name in SAMPLES]
    batch = [torch.stack(parts) for parts in zip(*each, strict=True)]
    lo, hi = ops.search_range(*batch, -128, 127, method, 99.9, symmetric)
    for c, one in enumerate(each):
        assert (lo[c].item(), hi[c].item()) == searched(one, (-128, 127), method, symmetric, 99.9)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("codes", [(-32768, 32767), (0, 65535), (-2048, 2047)], ids=str)
def test_many_levels(codes: tuple[int, int], symmetric: bool) -> None:
    """With finer steps than bins the whole range is as good as any."""
    found = histogram(samples("uniform"), bins=128)
    for method in ("mse", "l2"):
        lo, hi = searched(found, codes, method, symmetric)
        assert hi == pytest.approx(1, abs=0.05)
        assert lo <= 0


def test_a_histogram_at_the_other_end_of_the_scale_gives_the_mirrored_range() -> None:
    x = samples("skewed")
    for method in ("percentile", "mse", "l2", "entropy"):
        a, b = (searched(histogram(v), (-127, 127), method, False, 99.0) for v in (x, -x))
        assert a == pytest.approx((-b[1], -b[0]), abs=0.01 * (a[1] - a[0]))


@pytest.mark.parametrize("name", ["normal", "laplace", "outliers", "skewed"])
def test_affine_search_of_fine_histograms(name: str) -> None:
    found = histogram(samples(name), bins=400)
    h = reference.Bins(*found, -32, 31, symmetric=False)
    lo, hi = searched(found, (-32, 31), "mse", False)
    assert h.mse(round(-lo / h.width), round(hi / h.width)) <= 1.01 * min(h.mse(*ends) for ends in h.candidates())


# ---- in torch -----------------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    found = histogram(torch.randn(99))
    for x in (torch.randn(50), torch.randn(4, 6).t()[::2].double(), torch.empty(0)):
        torch.library.opcheck(native.observe_histogram_.default, (x, *found))
    for method in ("percentile", "mse", "l2", "entropy"):
        torch.library.opcheck(native.search_range.default, (*found, -128, 127, method))
    torch.library.opcheck(native.search_range.default, (*found, -128, 127, "entropy"), {"candidates": [3, 200]})
    batch = tuple(torch.stack([t, t]) for t in found)
    torch.library.opcheck(native.search_range.default, (*batch, -8, 7, "mse"), {"symmetric": False})


def test_versions_of_what_is_updated() -> None:
    found = empty()
    versions = [t._version for t in found]
    ops.observe_histogram_(torch.ones(3), *found)
    assert all(t._version > v for t, v in zip(found, versions, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_observer_updates_its_buffers(backend: str) -> None:
    torch._dynamo.reset()
    mine, theirs = HistogramObserver(qt.QuantSpec()), HistogramObserver(qt.QuantSpec())
    compiled = torch.compile(mine, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(3):
        x = floats(torch.float32, seed)(4 + seed, 50)
        compiled(x)
        theirs(x)
    assert_equal((mine.counts, mine.lo, mine.hi), (theirs.counts, theirs.lo, theirs.hi))


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if LAYOUTS[n](torch.empty).dim() == 4])
@pytest.mark.parametrize(("axis", "group"), [(0, 1), (1, 1), (-1, 1), (2, 2)])
def test_each_channel_has_the_histogram_of_its_values(axis: int, group: int, layout: str) -> None:
    x = LAYOUTS[layout](floats(torch.float32))
    group = group if x.size(0) % group == 0 else 1
    x = x * torch.logspace(-3, 3, x.size(axis)).reshape([-1 if d == axis % 4 else 1 for d in range(4)])
    count = x.size(axis) * group
    together = torch.zeros(count, 64, dtype=torch.int64), torch.zeros(count), torch.zeros(count)
    for part in (x / 100, x):
        ops.observe_histogram_(part, *together, axis, group)
    for i, one in enumerate(zip(*together, strict=True)):
        alone = empty(64)
        for part in (x / 100, x):
            ops.observe_histogram_(part.chunk(group)[i // x.size(axis)].select(axis, i % x.size(axis)), *alone)
        assert_equal(one, [t.reshape(o.shape) for t, o in zip(alone, one, strict=True)])


X = torch.ones(4, 6)
WRONG_OBSERVE = [
    ((X.int(), *empty()), TypeError, "observe_histogram_: x must be float32, float64, bfloat16 or float16, got Int"),
    ((X, torch.zeros(8), *empty()[1:]), TypeError, "observe_histogram_: counts must be int64, got Float"),
    ((X, *empty(7)), ValueError, "even number of bins from 2 to 1048576, got 7"),
    ((X, *empty(0)), ValueError, "even number of bins from 2 to 1048576, got 0"),
    ((X, empty()[0].view(2, 1024), *empty()[1:]), ValueError, "counts must have 1 dimension if axis is None"),
    ((X, *empty(), 1), ValueError, "counts must have shape (channels, bins) with 6 channels, got [2048]"),
    ((X, empty()[0].view(4, 512), *empty()[1:], 1), ValueError, "with 6 channels, got [4, 512]"),
    ((X, empty()[0].view(8, 256), *empty()[1:], 1, 3), ValueError, "group must divide x.size(0) = 4, got 3"),
    ((X, empty()[0].view(4, 512), torch.zeros(8)[::2], torch.zeros(4), 0), ValueError, "lo must be contiguous"),
    ((X, empty(16)[0][::2], *empty()[1:]), ValueError, "counts must be contiguous"),
    ((X, empty()[0], torch.zeros(2), torch.zeros(2)), ValueError, "lo must have 1 element, got 2"),
    ((X, empty()[0], torch.zeros(1).double(), torch.zeros(1)), TypeError, "lo must be float32, got Double"),
    ((X, empty()[0], torch.zeros(1), torch.zeros(1, device="meta")), ValueError, "hi must be on the device of counts"),
    (
        (X, empty()[0].to("meta"), torch.zeros(1), torch.zeros(1)),
        ValueError,
        "counts must be on the device of the input",
    ),
]
WRONG_SEARCH = [
    ({"method": "kl"}, ValueError, "search_range: method must be 'percentile', 'mse', 'l2' or 'entropy', got 'kl'"),
    (
        {"candidates": [3]},
        ValueError,
        "candidates need method 'entropy' and symmetric=True, got 'mse' and symmetric=True",
    ),
    ({"method": "entropy", "symmetric": False, "candidates": [3]}, ValueError, "got 'entropy' and symmetric=False"),
    (
        {"method": "entropy", "candidates": [3, 0]},
        ValueError,
        "candidates must lie in [1, 2048], since counts has that",
    ),
    ({"method": "entropy", "candidates": [2049]}, ValueError, "many bins, got 2049."),
    ({"percentile": 0.0}, ValueError, "percentile must lie in (0, 100], got 0"),
    ({"percentile": float("nan")}, ValueError, "percentile must lie in (0, 100], got nan"),
    ({"qmin": 3, "qmax": 2}, ValueError, "qmin must be smaller than qmax"),
    ({"qmin": 1, "qmax": 2}, ValueError, "must include 0 and a positive integer, and span at most 16 bits"),
    ({"qmin": 0, "qmax": 1 << 20}, ValueError, "and span at most 16 bits"),
    ({"counts": torch.zeros(3, 4, 8).long()}, ValueError, "counts must have shape (bins,) or (channels, bins)"),
    ({"counts": torch.zeros(3, 8).long()}, ValueError, "lo must have 3 elements, one per histogram, got 1"),
    ({"counts": torch.zeros(8)}, TypeError, "counts must be int64"),
    ({"lo": torch.zeros(1, dtype=torch.float16)}, TypeError, "lo must be float32, got Half"),
]


@pytest.mark.parametrize(("args", "error", "words"), WRONG_OBSERVE, ids=str)
def test_errors_of_observing(args: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        ops.observe_histogram_(*args)
    assert words in str(caught.value)


@pytest.mark.parametrize(("kwargs", "error", "words"), WRONG_SEARCH, ids=str)
def test_errors_of_searching(kwargs: dict, error: type[Exception], words: str) -> None:
    counts, lo, hi = histogram(X)
    with pytest.raises(error) as caught:
        ops.search_range(**{"counts": counts, "lo": lo, "hi": hi, **kwargs})
    assert words in str(caught.value)


# ---- what entropy can justify ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [(-128, 127), (0, 255), (-8, 7)], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize(
    "values",
    [
        torch.randint(15, 240, (4000,), generator=torch.Generator().manual_seed(0))
        / 255,  # an image without dark pixels
        torch.randint(0, 8, (4000,), generator=torch.Generator().manual_seed(0)).float(),
        torch.tensor([0.0, 3.0]).repeat(500),
        torch.full((100,), 5.0),
    ],
    ids=["pixels", "integers", "two", "one"],
)
def test_entropy_keeps_values_of_which_it_merges_none(values: Tensor, codes: tuple[int, int], symmetric: bool) -> None:
    """Ranges with fewer filled bins than levels have no divergence, however much they clip: they do not count."""
    lo, hi = ops.search_range(*histogram(values), *codes, method="entropy", symmetric=symmetric)
    clipped = ((values < lo) | (values > hi)).float().mean()
    levels = codes[1] + 1 if symmetric else codes[1] - codes[0] + 1  # those of values that are not negative
    assert clipped <= (0.01 if values.unique().numel() > levels else 0)
    assert lo <= 0 < hi


def test_entropy_does_not_cut_an_image_to_nothing() -> None:
    """Pixels between 0.06 and 0.94 lost 20 dB: a range with one filled bin was chosen."""
    torch.manual_seed(0)
    x = torch.randint(15, 240, (1, 3, 64, 64)) / 255
    quantizer = qt.TensorQuantizer(spec(observer_args={"method": "entropy"}))
    qt.calibrate(nn.Sequential(quantizer), [x], progress=False)
    error = (quantizer(x) - x).square().mean()
    assert float(10 * torch.log10(1 / error)) > 45


# ---- observer and calibration -------------------------------------------------------------------------------------------


def spec(**kwargs: object) -> qt.QuantSpec:
    return qt.QuantSpec(observer="histogram", **kwargs)


@pytest.mark.parametrize("method", ["percentile", "mse", "l2", "entropy"])
@pytest.mark.parametrize("how", [{}, {"bits": 4}, {"signed": False, "symmetric": False}, {"signed": False}])
def test_calibrate_with_histograms(method: str, how: dict) -> None:
    """The ranges are those that the search finds for the float activations, for any split into batches."""
    torch.manual_seed(0)
    model = nets.trained(nets.ConvNet(), 4, 3, 8, 8).eval()
    x = torch.randn(16, 3, 8, 8)
    args = {"method": method, "bins": 512, "percentile": 99.0}
    activation = spec(observer_args=args, **how)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(axis=0)))
    prepared = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt")
    others = [copy.deepcopy(prepared) for _ in range(2)]
    report = qt.calibrate(prepared, [x], progress=False)
    for other, size in zip(others, (8, 1), strict=True):
        assert (
            qt.calibrate(other, x.split(size), progress=False).ranges["activation_quantizers.x"]
            == (report.ranges["activation_quantizers.x"])
        )
    codes = (activation.qmin, activation.qmax)
    wanted = searched(histogram(x, bins=512), codes, method, activation.symmetric, 99.0)
    assert report.ranges["activation_quantizers.x"] == wanted
    quantizer = prepared.get_submodule("activation_quantizers.x")
    assert quantizer.ready
    assert torch.isfinite(prepared(x)).all()
    clipped = quantizer.scale * (activation.qmax - activation.qmin)
    assert clipped == pytest.approx((wanted[1] - wanted[0]) or 0, rel=0.05 if activation.bits == 8 else 0.2)


def test_quantizers_that_met_nan_or_nothing_are_named() -> None:
    quantizer = qt.TensorQuantizer(spec(), name="conv1")
    with pytest.raises(RuntimeError, match="'conv1' has observed nothing"):
        quantizer.load_observed()
    with pytest.raises(ValueError, match="'conv1' has observed NaN or infinities"), qt.calibrating(quantizer):
        quantizer(torch.tensor([1.0, INFINITY]))
    with qt.calibrating(quantizer):
        quantizer(torch.zeros(3))
    assert quantizer.load_observed() == (0, 0)
    assert quantizer.scale == 1


def test_the_largest_value_of_a_histogram_is_in_the_error() -> None:
    quantizer = qt.TensorQuantizer(spec(), name="conv1")
    with pytest.raises(ValueError, match=r"or values of 8.5e37 or more, which a histogram"), qt.calibrating(quantizer):
        quantizer(torch.tensor([1.0, 1e38]))
    with qt.calibrating(quantizer):
        quantizer(torch.tensor([1.0, 8e37]))
    assert quantizer.scale.isfinite()


def test_observing_while_quantizing_follows_the_histogram() -> None:
    quantizer = qt.TensorQuantizer(spec(observer_args={"method": "percentile", "percentile": 100}))
    quantizer.observing = True
    for top in (1.0, 4.0, 2.0):
        quantizer(torch.tensor([top]))
    assert quantizer.amax == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_casts_and_copies_keep_the_histogram(cast: str) -> None:
    observer = HistogramObserver(spec(observer_args={"bins": 64}))
    observer(torch.randn(99))
    same = getattr(copy.deepcopy(nn.Sequential(observer)), cast)()[0]
    assert_equal((same.counts, same.lo, same.hi), (observer.counts, observer.lo, observer.hi))
    same(getattr(torch.randn(9), cast)())
    assert same.counts.sum() == 108
    assert pickle.loads(pickle.dumps(observer)).range() == observer.range()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"axis": 0, "group_size": 4}, "observer='histogram' needs group_size=None, got 4; take 'minmax'"),
        ({"observer_args": {"bins": 7}}, "bins must be an even number from 2 to 1048576, got 7"),
        ({"observer_args": {"bins": 8.0}}, "bins must be an even number"),
        ({"observer_args": {"method": "msee"}}, "did you mean 'mse'"),
        ({"observer_args": {"percentile": 101}}, "percentile must lie in (0, 100], got 101"),
        ({"observer_args": {"percent": 99}}, "did you mean 'percentile'"),
    ],
)
def test_errors_of_the_spec(kwargs: dict, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        spec(**kwargs)
    assert words in str(caught.value)


def test_the_spec_goes_to_json_and_back() -> None:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec(observer_args={"method": "l2", "bins": 64}), None))
    assert qt.QConfigMapping.from_json(mapping.to_json()) == mapping


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ends", [(-127, 127), (0, 255), (-7, 7), (0, 15)])
@pytest.mark.parametrize("values", [8, 100, 200])
def test_of_equal_entropies_the_widest_range_is_taken(values: int, ends: tuple[int, int], symmetric: bool) -> None:
    """Integers leave most bins empty, so that many ranges have the same divergence."""
    generator = torch.Generator().manual_seed(values)
    data = torch.randint(0, values, (5000,), generator=generator).float()
    counts, *of_range = torch.zeros(2048, dtype=torch.int64), torch.tensor(0.0), torch.tensor(0.0)
    ops.observe_histogram_(data, counts, *of_range)
    _, high = ops.search_range(counts, *of_range, *ends, "entropy", symmetric=symmetric)
    assert high >= data.max()
