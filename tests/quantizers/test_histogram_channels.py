"""Per-channel histograms equal per-tensor histograms of each channel: counts, merged counts and chosen ranges."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.observers import HistogramObserver
from tests import reference

BINS = 512
METHODS = ["percentile", "mse", "l2", "entropy"]


def data(channels: int = 4, axis: int = 1) -> Tensor:
    """Channels of very different ranges, one without negative values and one of zeros."""
    x = torch.randn(16, channels, 5, 5) * torch.logspace(-3, 2, channels).reshape(-1, 1, 1)
    x[:, 1] = x[:, 1].abs()
    x[:, 2] = 0
    return x.transpose(1, axis)


def observer_of(x: Tensor, axis: int, group: int = 1, how: dict | None = None, **options: object) -> HistogramObserver:
    of = qt.QuantSpec(axis=axis, observer="histogram", observer_args={"bins": BINS, **options}, **(how or {}))
    return HistogramObserver(of, (x.size(axis) * group,), group)


def parts_of(x: Tensor, axis: int, group: int) -> list[Tensor]:
    """Return the values of each channel, numbered as in the oracle."""
    numbers, count = reference.channels(tuple(x.shape), axis, group)
    return [x[torch.from_numpy(numbers == i)] for i in range(count)]


@pytest.mark.parametrize(("axis", "group"), [(0, 1), (1, 1), (-1, 1), (1, 2), (1, 4)])
@pytest.mark.parametrize("sizes", [[16], [8, 8], [4, 12], [4] * 4])
def test_each_channel_counts_what_it_would_alone(axis: int, group: int, sizes: list[int]) -> None:
    """The counts do not depend on the batches. With groups there is one batch, which holds the whole weight."""
    x = data()
    observer = observer_of(x, axis, group)
    splits = x.split(sizes, 2 if axis == 0 else 0) if group == 1 and axis != 0 else [x]
    for part in splits:
        observer(part)
    for i, values in enumerate(parts_of(x, axis, group)):
        counts, lo, hi = reference.histogram(values, BINS)
        assert torch.equal(observer.counts[i], torch.from_numpy(counts))
        assert (float(observer.lo[i]), float(observer.hi[i])) == (lo, hi)
    assert observer.seen()
    assert observer.finite()


@pytest.mark.parametrize("how", [{}, {"signed": False, "symmetric": False}], ids=["symmetric", "affine"])
@pytest.mark.parametrize("method", METHODS)
def test_the_range_of_each_channel_is_the_best_for_it(method: str, how: dict) -> None:
    x = data()
    options = {"method": method, "percentile": 99.0}
    observer = observer_of(x, 1, how=how, **options)
    observer(x)
    lo, hi = observer.range()
    assert lo.shape == hi.shape == (4,)
    for i in range(4):
        alone = HistogramObserver(qt.QuantSpec(observer="histogram", observer_args={"bins": BINS, **options}, **how))
        alone(x[:, i])
        assert alone.range() == (lo[i], hi[i])


@pytest.mark.parametrize("method", ["mse", "l2", "entropy"])
def test_no_other_range_of_a_channel_is_better(method: str) -> None:
    """The oracle's error of every other candidate range is at least as large."""
    x = data()
    observer = observer_of(x, 1, how={"bits": 4}, method=method)
    observer(x)
    _, hi = observer.range()
    for i in (0, 1, 3):
        bins = reference.Bins(observer.counts[i], observer.lo[i], observer.hi[i], -8, 7, True)
        score = getattr(bins, method)
        best = min(score(*candidate) for candidate in bins.candidates())
        chosen = round(float(hi[i]) / bins.width)
        assert score(chosen, chosen) == pytest.approx(best, rel=1e-9)


def test_percentiles_are_those_of_each_channel() -> None:
    x = data()
    observer = observer_of(x, 1, method="percentile", percentile=90.0)
    observer(x)
    lo, hi = observer.range()
    for i in (0, 1, 3):
        bins = reference.Bins(observer.counts[i], observer.lo[i], observer.hi[i], -128, 127, True)
        assert (float(lo[i]), float(hi[i])) == pytest.approx(bins.percentile(90.0), rel=1e-6)
    assert (float(lo[2]), float(hi[2])) == (0, 0)


def test_processes_merge_exactly() -> None:
    x = data()
    whole, merged = observer_of(x, 1), observer_of(x, 1)
    whole(x)
    parts = [observer_of(x, 1) for _ in range(3)]
    for observer, part in zip(parts, x.split(7), strict=True):
        observer(part)
    merged.merge([observer.state() for observer in (*parts, observer_of(x, 1))])
    for name in ("counts", "lo", "hi"):
        assert torch.equal(getattr(merged, name), getattr(whole, name)), name


def test_a_broken_channel_breaks_the_merged_one_alone() -> None:
    x = data()
    whole, broken = observer_of(x, 1), observer_of(x, 1).eval()  # as in calibration; in training, NaN is left out
    whole(x)
    y = x.clone()
    y[3, 1, 0, 0] = torch.nan
    broken(y)
    whole.merge([whole.state(), broken.state()])
    assert torch.isfinite(whole.hi).tolist() == [True, False, True, True]
    assert not whole.finite()


# ---- in a quantizer


def spec(**kwargs: object) -> qt.QuantSpec:
    return qt.QuantSpec(observer="histogram", observer_args={"bins": BINS, "method": "mse"}, **kwargs)


@pytest.mark.parametrize("channels", [None, 4], ids=["unsized", "sized"])
def test_a_quantizer_has_a_range_for_each_channel(channels: int | None) -> None:
    x = data()
    quantizer = qt.TensorQuantizer(spec(axis=1), channels)
    model = nn.Sequential(quantizer)
    qt.calibrate(model, x.split(5), progress=False)
    observer = observer_of(x, 1)
    observer(x)
    lo, hi = observer.range()
    scale, _ = reference.grid_of_range(lo, hi, -128, 127, True, False)
    assert torch.equal(quantizer.scale, scale)
    assert torch.equal(quantizer(x), reference.fake_quant(x, scale, None, -128, 127, 1))
    loaded = qt.TensorQuantizer(spec(axis=1), channels)
    loaded.load_state_dict(quantizer.state_dict())
    assert torch.equal(loaded(x), quantizer(x))
    assert not loaded.observer.counts.any(), "what was observed is not in the state dict"
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), copy.deepcopy(quantizer).half()):
        assert torch.equal(twin.observer.counts, quantizer.observer.counts)
        assert torch.equal(twin.scale, quantizer.scale)


def test_weights_are_clipped_for_the_least_error() -> None:
    """A weight with an outlier per channel has a smaller error than with the largest magnitude, in each channel."""
    layer = nn.ConvTranspose2d(8, 6, 3, groups=2)
    with torch.no_grad():
        layer.weight[0, :, 0, 0], layer.weight[4, :, 1, 1] = 1.0, -2.0
    errors = {}
    for name, how in (("mse", spec(bits=4, axis=1)), ("max", qt.QuantSpec(bits=4, axis=1))):
        ours = qt.nn.QuantConvTranspose2d.from_float(copy.deepcopy(layer), how)
        assert ours.weight_quantizer.scale.shape == (6,)
        squares = (ours.weight_quantizer(layer.weight) - layer.weight).square()
        errors[name] = squares.reshape(2, 4, 3, -1).sum((1, 3))
    assert (errors["mse"] < errors["max"]).all()


def test_bad_values_in_one_channel_name_the_quantizer() -> None:
    quantizer = qt.TensorQuantizer(spec(axis=1), name="conv1.input_quantizer")
    x = data()
    x[0, 2, 0, 0] = torch.inf
    with (
        pytest.raises(ValueError, match="'conv1.input_quantizer' has observed NaN or infinities"),
        qt.calibrating(quantizer),
    ):
        quantizer(x)


def test_a_quantizer_that_saw_nothing_says_so() -> None:
    quantizer = qt.TensorQuantizer(spec(axis=0), 3, name="fc.weight_quantizer")
    with pytest.raises(RuntimeError, match="'fc.weight_quantizer' has observed nothing"):
        quantizer.load_observed()


# ---- what serves calibration alone


def histogram_model(observer: str = "histogram") -> nn.Module:
    torch.manual_seed(0)
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(qt.QuantSpec(observer=observer), qt.QuantSpec(axis=0, observer=observer))
    )
    model = qt.prepare(nn.Sequential(nn.Linear(4, 6)).eval(), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(model, [torch.randn(32, 4)], progress=False)
    return model.eval()


def test_histograms_are_neither_saved_nor_broadcast() -> None:
    model = histogram_model()
    assert not [name for name in model.state_dict() if "observer" in name]
    assert not [name for name, _ in model.named_buffers() if "observer" in name]
    assert sum(t.numel() for t in (*model.state_dict().values(), *model.buffers())) < 100
    loaded = histogram_model()
    qt.calibrate(loaded, [torch.randn(8, 4) * 9], progress=False)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_checkpoints_with_histograms_still_load() -> None:
    model = histogram_model()
    old = dict(model.state_dict())
    for name, quantizer in qt.quantizers_of(model).items():
        old |= {f"{name}.observer.{key}": value for key, value in quantizer.observer.state().items()}
    assert len(old) > len(model.state_dict())
    loaded = histogram_model()
    result = loaded.load_state_dict(old)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


@pytest.mark.parametrize(
    ("saved", "into"), [("histogram", "minmax"), ("minmax", "histogram"), ("moving_average", "minmax")]
)
def test_the_observer_of_a_checkpoint_may_differ(saved: str, into: str) -> None:
    model, loaded = histogram_model(saved), histogram_model(into)
    result = loaded.load_state_dict(model.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    if into == "minmax" and saved == "histogram":  # these ranges follow the weight, which those of histograms do not
        layer = loaded.get_submodule("0")
        assert torch.equal(layer.weight_quantizer.scale, layer.weight.detach().abs().amax(1) / 127)
        qt.freeze_ranges(loaded)
        loaded.load_state_dict(dict(model.state_dict()))
    assert torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_histograms_move_with_the_model_and_come_back_after_an_error() -> None:
    model = histogram_model()
    observers = [quantizer.observer for quantizer in qt.quantizers_of(model).values()]
    before = [observer.state() for observer in observers]
    with pytest.raises(RuntimeError):
        qt.calibrate(model, [torch.randn(3, 4), torch.randn(3, 5)], progress=False)
    for observer, state in zip(observers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in observer.state().items())
    observer = copy.deepcopy(observers[0]).to("meta")
    assert {tensor.device.type for tensor in (observer.counts, observer.lo, observer.hi)} == {"meta"}
    assert copy.deepcopy(observers[0]).half().hi.dtype == torch.float32
