"""Every observer of the table: its range against a plain formula, batches, processes, channels, odd data, the documentation."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.table import OBSERVERS
from tests import reference

POW2 = ("pow2", "pow2_mode")
EXACT = ("minmax", "histogram", "pow2", "constant")  # the same for any split of the data
SUMS = ("lsq", "clip_std")  # the same up to the order of sums
MOVING = ("moving_average", "moving_histogram")
OPTIONS = {
    "moving_histogram": {"momentum": 0.25, "method": "percentile", "percentile": 95.0},
    "histogram": {"bins": 512},
    "constant": {"low": -2.0, "high": 3.0},
}


def data(outlier: float = 9.0) -> Tensor:
    """Inputs of (n, 4, 5) whose channels differ, one without negative values, with an outlier."""
    x = torch.randn(24, 4, 5) * torch.tensor([0.1, 1.0, 3.0, 0.5]).reshape(4, 1)
    x[:, 1] = x[:, 1].abs()
    x[7, 2, 1] = outlier
    return x


def spec_of(observer: str, **fields: object) -> qt.QuantSpec:
    options = {**OPTIONS.get(observer, {}), **fields.pop("observer_args", {})}
    return qt.QuantSpec(observer=observer, observer_args=options, pow2_scale=observer in POW2, **fields)


def quantizer_of(observer: str, *batches: Tensor, channels: int | None = None, **fields: object) -> qt.TensorQuantizer:
    quantizer = qt.TensorQuantizer(spec_of(observer, **fields), channels)
    with qt.calibrating(quantizer):
        for batch in batches:
            quantizer(batch)
    return quantizer


# ---- the formulas, of batches of values that share a range


def minmax(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    return min(x.min() for x in batches), max(x.max() for x in batches)


def average(ends: list[tuple[float, float]], momentum: float) -> tuple[float, float]:
    lo, hi = ends[0]
    for low, high in ends[1:]:
        lo, hi = lo + momentum * (low - lo), hi + momentum * (high - hi)
    return lo, hi


def moving_average(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    return average([(x.min(), x.max()) for x in batches], 0.1)


def clip_std(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    x = np.concatenate(batches).astype(np.float64)
    deviations = spec.observer_args.get("deviations", 2.6)
    return (
        max(x.mean() - deviations * x.std(), x.min()),
        min(x.mean() + deviations * x.std(), x.max()),
    )


def lsq(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    x = np.concatenate(batches).astype(np.float64)
    largest = np.abs(x).max() / spec.qmax
    factor = min(2 * np.abs(x).mean() / spec.qmax**0.5 / largest, 1)
    return x.min() * factor, x.max() * factor


def bins_of(x: np.ndarray, spec: qt.QuantSpec, bins: int) -> reference.Bins:
    counts, lo, hi = reference.histogram(torch.from_numpy(x), bins)
    return reference.Bins(torch.from_numpy(counts), lo, hi, spec.qmin, spec.qmax, spec.symmetric)


def histogram(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    """By squared error: the largest of the best, which another test of histograms checks for every method."""
    bins = bins_of(np.concatenate(batches), spec, 512)
    candidates = bins.candidates()
    errors = np.array([bins.mse(a, b) for a, b in candidates])
    best = candidates[np.flatnonzero(errors <= errors.min() * (1 + 1e-9))[-1]]
    return -best[0] * bins.width, best[1] * bins.width


def moving_histogram(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    ends = []
    for x in batches:
        lo, hi = bins_of(x, spec, 2048).percentile(95.0)
        ends.append((max(lo, x.min()), min(hi, x.max())))
    return average(ends, 0.25)


def constant(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    return spec.observer_args["low"], spec.observer_args["high"]


def best_exponent(x: np.ndarray, spec: qt.QuantSpec) -> int:
    """The exponent with the least squared error on the values themselves."""
    x = x.astype(np.float64)
    top = int(np.ceil(np.log2(np.abs(x).max() / spec.qmax)))

    def error(exponent: int) -> float:
        step = 2.0**exponent
        return float(((np.clip(np.rint(x / step), spec.qmin, spec.qmax) * step - x) ** 2).sum())

    return min(range(top, top - 8, -1), key=error)


def range_of(exponent: int, spec: qt.QuantSpec) -> tuple[float, float]:
    return -(2.0**exponent) * spec.qmax, 2.0**exponent * spec.qmax


def pow2(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    return range_of(best_exponent(np.concatenate(batches), spec), spec)


def pow2_mode(batches: list[np.ndarray], spec: qt.QuantSpec) -> tuple[float, float]:
    votes = [best_exponent(x, spec) for x in batches]
    return range_of(max(sorted(votes, reverse=True), key=votes.count), spec)


FORMULAS: dict[str, Callable[[list[np.ndarray], qt.QuantSpec], tuple[float, float]]] = {
    formula.__name__: formula
    for formula in (
        minmax,
        moving_average,
        clip_std,
        lsq,
        histogram,
        moving_histogram,
        pow2,
        pow2_mode,
        constant,
    )
}


def test_every_observer_has_a_formula() -> None:
    assert FORMULAS.keys() == OBSERVERS.keys()


@pytest.mark.parametrize("axis", [None, 1], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_the_range_is_that_of_the_formula(observer: str, bits: int, axis: int | None) -> None:
    batches = data().split([4, 4, 16])
    quantizer = quantizer_of(observer, *batches, bits=bits, axis=axis)
    lo, hi = quantizer.observer.range()
    for i, (low, high) in enumerate(zip(lo.reshape(-1), hi.reshape(-1), strict=True)):
        parts = [(x if axis is None else x[:, i]).reshape(-1).numpy() for x in batches]
        wanted = FORMULAS[observer](parts, quantizer.spec)
        assert (float(low), float(high)) == pytest.approx(wanted, rel=2e-6)
    assert quantizer.observer.seen()
    assert quantizer.observer.finite()


@pytest.mark.parametrize("axis", [None, 1], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("observer", [*EXACT, *SUMS])
def test_batches_and_processes_change_nothing(observer: str, axis: int | None) -> None:
    x = data()
    whole = quantizer_of(observer, x, axis=axis)
    split = quantizer_of(observer, x[:1], x[1:1], x[1:9], x[9:], axis=axis)
    ranks = [quantizer_of(observer, part, axis=axis) for part in (x[:5], x[5:])]
    empty = qt.TensorQuantizer(spec_of(observer, axis=axis))
    if axis is not None:
        empty.observer.resize((4,))
    ranks[0].merge_observed([rank.observer.state() for rank in (*ranks, empty)])
    ranks[0].load_observed()
    for other in (split, ranks[0]):
        torch.testing.assert_close(other.scale, whole.scale, rtol=0 if observer in EXACT else 1e-6, atol=0)


def test_votes_add_up_over_processes() -> None:
    x = data()
    whole = quantizer_of("pow2_mode", *x.split(1), axis=1)
    ranks = [quantizer_of("pow2_mode", *part.split(1), axis=1) for part in (x[::3], x[1::3], x[2::3])]
    ranks[0].observer.merge([rank.observer.state() for rank in ranks])
    assert torch.equal(ranks[0].observer.votes, whole.observer.votes)
    assert torch.equal(ranks[0].observer.range()[1], whole.observer.range()[1])
    assert whole.observer.votes.sum(-1).tolist() == [24] * 4


@pytest.mark.parametrize("observer", MOVING)
def test_moving_averages_of_processes_have_their_mean(observer: str) -> None:
    x = data()
    ranks = [quantizer_of(observer, *part.split(3)) for part in (x[:9], x[9:])]
    wanted = torch.stack([rank.observer.range()[1] for rank in ranks]).mean(0)
    unseen = qt.TensorQuantizer(spec_of(observer))
    ranks[0].observer.merge([rank.observer.state() for rank in (*ranks, unseen)])
    torch.testing.assert_close(ranks[0].observer.range()[1], wanted)


@pytest.mark.parametrize(
    "fields",
    [{"axis": 0}, {"axis": -1}, {"signed": False}, {"signed": False, "symmetric": False}, {"narrow": True}],
    ids=str,
)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_channel_is_observed_as_it_would_be_alone(observer: str, fields: dict) -> None:
    if observer in POW2 and not fields.get("symmetric", True):
        pytest.skip("powers of two have no zero point")
    x = data().abs() if fields.get("signed") is False else data()
    axis = fields.pop("axis", 1)
    each = quantizer_of(observer, x, axis=axis, **fields)
    for i in range(x.size(axis)):
        alone = quantizer_of(observer, x.select(axis, i), **fields)
        torch.testing.assert_close(each.scale[i], alone.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_groups_of_a_transposed_convolution(observer: str) -> None:
    """Its weight (in, out / groups, k) has groups along dimension 0."""
    weight = torch.randn(6, 4, 3) * torch.arange(1, 7).reshape(6, 1, 1)
    spec = spec_of(observer, axis=1)
    quantizer = qt.TensorQuantizer(spec, channels=8, group=2)
    with qt.calibrating(quantizer):
        quantizer(weight)
    for i in range(8):
        alone = quantizer_of(observer, weight[i // 4 * 3 : i // 4 * 3 + 3, i % 4])
        torch.testing.assert_close(quantizer.scale[i], alone.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_other_dtypes_have_the_range_of_their_values(observer: str, dtype: torch.dtype) -> None:
    x = data(outlier=500.0).to(dtype)  # its square is not finite in float16
    found = quantizer_of(observer, x).scale
    torch.testing.assert_close(found, quantizer_of(observer, x.float()).scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exponent", [-100, -70, 70, 120])  # squares are beyond float32, and below it
@pytest.mark.parametrize("observer", [name for name in OBSERVERS if name != "constant"])
def test_a_power_of_two_in_the_values_is_one_in_the_range(observer: str, exponent: int) -> None:
    batches = data(outlier=30.0).split(12)
    plain = quantizer_of(observer, *batches, bits=4).observer.range()
    found = quantizer_of(observer, *(x * 2.0**exponent for x in batches), bits=4).observer.range()
    for end, of_plain in zip(found, plain, strict=True):
        torch.testing.assert_close(end * 2.0**-exponent, of_plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "lsq"])
def test_a_range_wider_than_float32_is_an_error(observer: str) -> None:
    x = data(outlier=3.0).clamp(-3, 3) * 1e38
    with pytest.raises(ValueError, match="scale must be positive and finite, got inf"):
        quantizer_of(observer, torch.cat([x, -x]), symmetric=False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_bad_values_stop_the_calibration_and_enter_no_range(observer: str, value: float) -> None:
    x, quantizer = data(), quantizer_of(observer, data(), axis=1)
    x[3, 2, 0] = value
    quantizer.observer.reset()
    quantizer.observing, quantizer.quantizing = True, False
    quantizer(data())
    before = quantizer.observer.state()
    quantizer.train()(x)
    with pytest.raises(ValueError, match="has observed NaN or infinities"):
        quantizer.load_observed()
    after = quantizer.observer.state()
    for name in ("lo", "hi"):  # of the channel
        assert torch.equal(before[name][2], after[name][2]), name
    if observer not in ("histogram", "pow2"):  # which leave the whole input out
        assert quantizer.observer.skipped.tolist() == [0, 0, 1, 0]
    assert not quantizer.observer.range()[1].isnan().any()


@pytest.mark.parametrize("x", [torch.zeros(9), torch.full((9,), 3.0), torch.full((9,), -1e-30)], ids=str)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_constants_have_a_positive_scale(observer: str, x: Tensor) -> None:
    quantizer = quantizer_of(observer, x)
    assert 0 < float(quantizer.scale) < 10
    assert torch.equal(quantizer(torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("observer", OBSERVERS)
def test_copies_casts_and_a_reset(observer: str) -> None:
    x = data()
    quantizer = quantizer_of(observer, x, axis=1)
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), copy.deepcopy(quantizer).half()):
        twin.load_observed()
        assert torch.equal(twin.scale, quantizer.scale)
    loaded = qt.TensorQuantizer(spec_of(observer, axis=1))
    loaded.load_state_dict(quantizer.state_dict())
    assert torch.equal(loaded(x), quantizer(x))
    quantizer.observer.reset()
    assert not quantizer.observer.seen()
    with qt.calibrating(quantizer):
        quantizer(x)
    assert quantizer.observer.seen()


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_model_trains_with_it_on_both_routes(observer: str) -> None:
    """Weights too; a range that its observer does not follow stays as calibrated."""
    spec = spec_of(observer, axis=0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec_of(observer), spec))
    x = torch.randn(16, 6)
    for build in (qt.prepare, qt.quant_modules.replace):
        torch.manual_seed(0)
        model = build(
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).train(),
            qconfig_mapping=mapping,
            backend="tensorrt",
        )
        report = qt.calibrate(model, x.split(4), progress=False)
        assert not report.unreached
        weight = model.get_submodule("0.weight_quantizer")
        before = weight.scale.clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert weight.follows == (observer in ("minmax", "moving_average"))
        assert torch.equal(weight.scale, before) != weight.follows
        assert qt.convert(model.eval())(x).isfinite().all()


def test_clip_std_clips_an_outlier() -> None:
    x = torch.cat([torch.randn(10_000), torch.tensor([100.0])])
    found = quantizer_of("clip_std", x).amax
    assert 2.0 < float(found) < 6.0
    wide = quantizer_of("clip_std", x, observer_args={"deviations": 1e4}).amax
    assert float(wide) == 100.0


def test_clip_std_is_exact_far_from_zero() -> None:
    """A sum of squares in place of squared differences would lose all digits."""
    x = 1000 + 0.001 * torch.randn(4096, dtype=torch.float64)
    quantizer = quantizer_of("clip_std", *x.split(64), symmetric=False, signed=False)
    lo, hi = quantizer.observer.range()
    assert float(hi - lo) == pytest.approx(5.2 * float(x.std(correction=0)), rel=0.1)


def test_the_quantile_of_a_symmetric_range_is_that_of_magnitudes() -> None:
    """MQBench's EMAQuantileObserver."""
    x = data().reshape(-1)
    options = {"method": "percentile", "percentile": 90.0, "momentum": 0.1}
    found = quantizer_of("moving_histogram", x, observer_args=options).observer.range()[1]
    assert float(found) == pytest.approx(float(x.abs().quantile(0.9)), rel=0.05)


def test_pow2_ranges_are_kept_by_the_grid() -> None:
    for observer in POW2:
        for bits in (2, 4, 8, 16):
            quantizer = quantizer_of(observer, data() * 1.7, bits=bits)
            exponent = float(quantizer.scale.log2())
            assert exponent == int(exponent)
            assert float(quantizer.amax) == float(quantizer.observer.range()[1])


def test_pow2_is_at_least_as_near_as_the_one_that_clips_nothing() -> None:
    x = data(outlier=30.0)
    squares = {}
    for observer in ("minmax", "pow2"):
        quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=4, observer=observer, pow2_scale=True))
        qt.calibrate(nn.Sequential(quantizer), [x], progress=False)
        squares[observer] = float((quantizer(x) - x).square().sum())
    assert squares["pow2"] < 0.9 * squares["minmax"]


def test_one_large_batch_does_not_move_the_mode() -> None:
    x = torch.randn(10, 64)
    few = quantizer_of("pow2_mode", *x.split(1), x[:1] * 1000)
    assert torch.equal(few.scale, quantizer_of("pow2_mode", *x.split(1)).scale)
    tie = quantizer_of("pow2_mode", x[:1], x[:1] * 4)
    assert torch.equal(tie.scale, quantizer_of("pow2_mode", x[:1] * 4).scale)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"observer": "clip_std", "observer_args": {"deviations": 0}}, "deviations must be a positive number, got 0"),
        ({"observer": "clip_std", "observer_args": {"k": 2}}, "unknown option of observer 'clip_std' 'k'"),
        ({"observer": "lsq", "observer_args": {"momentum": 1}}, "observer 'lsq' takes no options"),
        ({"observer": "moving_histogram", "observer_args": {"momentum": 0}}, r"momentum must lie in \(0, 1\], got 0"),
        ({"observer": "moving_histogram", "observer_args": {"bins": 3}}, "bins must be an even number"),
        ({"observer": "moving_histogram", "observer_args": {"method": "kl"}}, "observer 'moving_histogram' 'kl'"),
        ({"observer": "moving_histogram", "axis": 1, "group_size": 2}, "observer='moving_histogram' needs group_size"),
        ({"observer": "moving_histogram", "format": "e4m3"}, "another observer than 'moving_histogram'"),
        ({"observer": "pow2"}, "observer='pow2' chooses powers of two .* pow2_scale=True, got 'int', True and False"),
        ({"observer": "pow2_mode", "pow2_scale": True, "symmetric": False}, "symmetric=True and .*'int', False and"),
        ({"observer": "pow2", "pow2_scale": True, "axis": 1, "group_size": 2}, "observer='pow2' needs group_size"),
        ({"observer": "pow2", "pow2_scale": True, "observer_args": {"bins": 7}}, "bins must be an even number"),
    ],
    ids=str,
)
def test_specs_that_exclude_each_other(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qt.QuantSpec(**fields)


def test_calibrate_takes_every_observer_as_a_method() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    spec = qt.QuantSpec(pow2_scale=True)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    for observer in OBSERVERS:
        model = qt.prepare(nn.Sequential(nn.Linear(4, 3)).eval(), qconfig_mapping=mapping, backend="tensorrt")
        qt.calibrate(model, x.split(8), progress=False, method=observer)
        quantizer = qt.quantizers_of(model)["activation_quantizers.input_1"]
        assert quantizer.spec.observer == observer
        assert type(quantizer.observer) is OBSERVERS[observer]
        assert quantizer.ready


DOCS = Path(__file__).parents[2] / "docs" / "observers.md"


def test_the_table_of_the_documentation_has_every_observer_with_its_options() -> None:
    rows = re.findall(r"^\| `\"(\w+)\"` \|[^|]*\|([^|]*)\|", DOCS.read_text(), flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(OBSERVERS)
    for name, options in rows:
        documented = re.findall(r"`(\w+)=([^`]+)`", options)
        wanted = {
            key: f'"{value}"' if isinstance(value, str) else str(value)
            for key, value in OBSERVERS[name].OPTIONS.items()
        }
        assert dict(documented) == wanted
