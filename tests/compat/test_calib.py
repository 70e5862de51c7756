"""pytorch-quantization's calibrators and helpers: its formulas written as plain loops, and numbers worked out by hand."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qtoolkit.compat.pytorch_quantization import calib
from qtoolkit.compat.pytorch_quantization.calib import HistogramCalibrator, MaxCalibrator
from qtoolkit.compat.pytorch_quantization.nn.functional import clip
from qtoolkit.compat.pytorch_quantization.optim import helper
from qtoolkit.compat.pytorch_quantization.reduction import reduce_amax
from tests import reference

# ---- reduce_amax


def test_reduce_amax() -> None:
    x = torch.randn(3, 4, 5)
    values = np.abs(x.numpy())
    assert reduce_amax(x) == values.max()
    assert reduce_amax(x).shape == ()
    for axis, kept in ((1, (3, 1, 5)), ((0, 2), (1, 4, 1)), ([1, -1], (3, 1, 1)), ((), (3, 4, 5))):
        found = reduce_amax(x, axis)
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        np.testing.assert_array_equal(found.numpy(), values.max(axes, keepdims=True) if axes else values)
        assert tuple(found.shape) == kept
    assert reduce_amax(x, (0, 2), keepdims=False).shape == (4,)
    assert reduce_amax(x[:1, :1], (2,)).shape == ()  # one element
    assert not reduce_amax(x.requires_grad_()).requires_grad


def test_reduce_amax_refuses_more_axes_than_there_are() -> None:
    with pytest.raises(ValueError, match="Cannot reduce more axes than tensor's dim."):
        reduce_amax(torch.zeros(2, 2), (0, 1, 2))


# ---- max


@pytest.mark.parametrize(
    ("axis", "shape"), [(None, ()), (0, (2, 1, 1)), (-2, (1, 3, 1)), ((0, 2), (2, 1, 4)), ([1], (1, 3, 1))]
)
def test_max_is_the_running_maximum(axis: object, shape: tuple[int, ...]) -> None:
    calibrator = MaxCalibrator(8, axis, False, track_amax=True)
    assert calibrator.compute_amax() is None
    batches = [torch.randn(2, 3, 4) * scale for scale in (1, 3, 2)]
    for batch in batches:
        calibrator.collect(batch)
    kept = {a % 3 for a in ((axis,) if isinstance(axis, int) else axis or ())}
    reduced = tuple(d for d in range(3) if d not in kept)
    wanted = np.abs(torch.stack(batches).numpy()).max((0, *(d + 1 for d in reduced)))
    amax = calibrator.compute_amax()
    assert amax.shape == shape
    np.testing.assert_array_equal(amax.numpy().reshape(wanted.shape), wanted)
    assert [a.max() for a in calibrator.amaxs] == [float(b.abs().max()) for b in batches]
    calibrator.reset()
    assert calibrator.compute_amax() is None
    assert calibrator.amaxs == []


def test_max_keeps_what_it_returned_as_it_was() -> None:
    calibrator = MaxCalibrator(8, None, False)
    calibrator.collect(torch.tensor([1.0]))
    before = calibrator.compute_amax()
    calibrator.collect(torch.tensor([2.0]))
    assert (before, calibrator.compute_amax()) == (1, 2)


def test_max_refuses_other_shapes() -> None:
    calibrator = MaxCalibrator(8, 0, False)
    calibrator.collect(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"amax shape changed! It was \[2, 1\], got \[3, 1\]."):
        calibrator.collect(torch.ones(3, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [MaxCalibrator, HistogramCalibrator])
def test_values_that_are_not_finite_are_refused(kind: type, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: the values to calibrate with must be finite"):
        kind(8, None, False).collect(torch.tensor([1.0, bad]))


# ---- counting


def counted(*batches: Tensor, **options: object) -> HistogramCalibrator:
    calibrator = HistogramCalibrator(8, None, False, **options)
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def test_the_first_histogram_by_hand() -> None:
    calibrator = counted(torch.tensor([0.0, 0.5, -1.0, 1.5, 3.0, -4.0, 4.0]), num_bins=4)
    assert calibrator._calib_hist.tolist() == [2, 2, 0, 3]  # the last bin holds its right edge
    assert calibrator._calib_bin_edges.tolist() == [0, 1, 2, 3, 4]


def test_growth_keeps_the_width() -> None:
    """The edge of an old bin's right end belongs to it; later values on that edge fall in the next."""
    calibrator = counted(torch.tensor([0.5, 4.0]), torch.tensor([4.0, 9.5]), num_bins=4)
    assert calibrator._calib_bin_edges.tolist() == list(range(11))
    assert calibrator._calib_hist.tolist() == [1, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert calibrator._num_bins == 10
    calibrator.collect(torch.tensor([2.5]))
    assert calibrator._calib_hist.tolist() == [1, 0, 1, 1, 1, 0, 0, 0, 0, 1]


def test_growth_to_a_whole_number_of_widths() -> None:
    calibrator = counted(torch.tensor([4.0]), torch.tensor([8.0]), num_bins=4)
    assert calibrator._calib_bin_edges.tolist() == list(range(9))
    assert calibrator._calib_hist.tolist() == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_no_value_is_lost_in_growing(seed: int) -> None:
    torch.manual_seed(seed)
    batches = [torch.randn(1000) * scale for scale in (0.1, 1.7, 0.3, 4.1)]
    calibrator = counted(*batches)
    assert int(calibrator._calib_hist.sum()) == 4000
    assert len(calibrator._calib_bin_edges) == len(calibrator._calib_hist) + 1 == calibrator._num_bins + 1
    assert float(calibrator._calib_bin_edges[1]) == float(batches[0].abs().max() / 2048)
    with pytest.warns(UserWarning, match="torch_hist=False is ignored"):
        assert torch.equal(counted(*batches, torch_hist=False)._calib_hist, calibrator._calib_hist)


def test_zeros_can_be_skipped() -> None:
    x = torch.tensor([0.0, 0.0, 1.0, 2.0])
    assert counted(x, num_bins=2)._calib_hist.tolist() == [2, 2]
    assert counted(x, num_bins=2, skip_zeros=True)._calib_hist.tolist() == [0, 2]
    assert counted(torch.zeros(3), skip_zeros=True).compute_amax() is None


def test_a_first_batch_of_zeros_waits_for_a_width() -> None:
    calibrator = counted(torch.zeros(5), torch.zeros(2), num_bins=4)
    assert calibrator.compute_amax() == 0
    calibrator.collect(torch.tensor([4.0, 1.5]))
    assert calibrator._calib_hist.tolist() == [7, 1, 0, 1]
    assert calibrator._calib_bin_edges.tolist() == [0, 1, 2, 3, 4]


def test_counts_go_beyond_float32() -> None:
    x = torch.ones((1 << 24) + 3, dtype=torch.float16)
    assert counted(x, num_bins=2)._calib_hist.tolist() == [0, (1 << 24) + 3]


def test_grow_method_is_named_as_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="grow_method is deprecated and ignored, got 'append'"):
        HistogramCalibrator(8, None, False, grow_method="append")


# ---- ranges, by the formulas as plain loops


def entropy_of(counts: np.ndarray, i: int, levels: int) -> float:
    """KL(P || Q) of the first i bins."""
    places = np.digitize(np.arange(i), np.linspace(0, i, levels + 1)).tolist()
    level_of = [place - 1 if count else None for place, count in zip(places, counts[:i], strict=True)]
    totals, members = Counter(), Counter()
    for j, level in enumerate(level_of):
        if level is not None:
            totals[level] += counts[j]
            members[level] += 1
    q = [0.0 if level is None else totals[level] / members[level] for level in level_of]
    p = [*counts[: i - 1], counts[i - 1] + sum(counts[i:])]
    divergence = 0.0
    for a, b in zip(p, q, strict=True):
        if a and not b:
            return np.inf
        if a:
            divergence += a / sum(p) * np.log((a / sum(p)) / (b / sum(q)))
    return divergence


def entropy_amax(calibrator: HistogramCalibrator, levels: int, start: int, stride: int) -> float:
    counts = calibrator._calib_hist.tolist()
    counts[0] = counts[1]
    best, amax = np.inf, None
    for i in range(start, len(counts) + 1, stride):
        score = entropy_of(np.array(counts, dtype=np.float64), i, levels)
        if score <= best:  # the last of the best
            best, amax = score, float(calibrator._calib_bin_edges[i])
    return amax


def mse_amax(calibrator: HistogramCalibrator, bits: int, unsigned: bool, start: int, stride: int) -> float:
    edges = calibrator._calib_bin_edges
    centers = (edges[1:] + edges[:-1]) / 2
    best, amax = np.inf, None
    for i in range(start, len(centers), stride):
        codes, scale = reference.tensor_quant(centers, centers[i], bits, unsigned, True)[:2]
        errors = (codes.float() / scale.float() - centers).double() ** 2
        score = float((errors * calibrator._calib_hist).mean())
        if score < best:  # the first of the best
            best, amax = score, float(centers[i])
    return amax


SHAPES = {
    "normal": lambda: torch.randn(20000),
    "outlier": lambda: torch.cat([torch.tensor([30.0]), torch.randn(20000)]),
    "relu": lambda: torch.randn(20000).relu(),
    "exponential": lambda: torch.randn(5000).exp(),
    "integers": lambda: torch.randint(0, 8, (20000,)).float(),  # several ranges that lose nothing
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("bits", "unsigned", "stride", "start"),
    [
        *((8, False, 1, 128), (4, True, 3, 40), (6, False, 1, 64), (8, False, 7, 20), (8, True, 5, 150)),
        *((1, True, 1, 1), (2, False, 2, 1), (12, False, 1, 100), (20, True, 9, 100)),
    ],
)
def test_entropy(name: str, bits: int, unsigned: bool, stride: int, start: int) -> None:
    calibrator = HistogramCalibrator(bits, None, unsigned, num_bins=200)
    for batch in SHAPES[name]().split(6000):
        calibrator.collect(batch)
    before = calibrator._calib_hist.clone()
    amax = calibrator.compute_amax("entropy", stride=stride, start_bin=start)
    assert float(amax) == entropy_amax(calibrator, 1 << (bits - 1 + unsigned), start, stride)
    assert torch.equal(calibrator._calib_hist, before)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("bits", "unsigned", "stride", "start"), [(8, False, 1, 128), (4, True, 3, 20), (3, False, 1, 5)]
)
def test_mse(name: str, bits: int, unsigned: bool, stride: int, start: int) -> None:
    calibrator = HistogramCalibrator(bits, None, unsigned, num_bins=300)
    for batch in SHAPES[name]().split(6000):
        calibrator.collect(batch)
    amax = calibrator.compute_amax("mse", stride=stride, start_bin=start)
    assert float(amax) == mse_amax(calibrator, bits, unsigned, start, stride)


def test_mse_of_the_float_format() -> None:
    calibrator = HistogramCalibrator((4, 3), None, False, num_bins=60)
    calibrator.collect(torch.randn(5000))
    edges, best, amax = calibrator._calib_bin_edges, np.inf, None
    centers = (edges[1:] + edges[:-1]) / 2
    for i in range(10, 60, 7):
        scale = 448 / centers[i]
        values = (centers * scale).clamp(max=448).to(torch.float8_e4m3fn).float() / scale
        score = float(((values - centers).double() ** 2 * calibrator._calib_hist).mean())
        if score < best:
            best, amax = score, float(centers[i])
    assert float(calibrator.compute_amax("mse", start_bin=10, stride=7)) == amax


def test_percentile_by_hand() -> None:
    """Ten values in bins of width 1: 4, 3, 2, 0, 1. The range is the left edge of the bin that reaches the share.

    In float64 0.4 + 0.3 + 0.2 is less than 0.9, and all shares are less than 1: pytorch-quantization takes the next bin.
    """
    x = torch.tensor([0.1, 0.2, 0.3, 0.4, 1.1, 1.2, 1.3, 2.1, 2.2, 5.0])
    calibrator = counted(x, num_bins=5)
    assert calibrator._calib_hist.tolist() == [4, 3, 2, 0, 1]
    wanted = {0: 0, 40: 0, 41: 1, 70: 1, 71: 2, 89.99: 2, 90: 4, 99.99: 4, 100: 5}
    assert {p: float(calibrator.compute_amax("percentile", percentile=p)) for p in wanted} == wanted
    assert calibrator.compute_amax() == calibrator.compute_amax("percentile", percentile=99.99)  # the default


@pytest.mark.parametrize("count", [100, 200, 1000])
@pytest.mark.parametrize("percentile", [50, 90, 99, 99.9])
def test_a_share_that_is_met_exactly_chooses_pytorch_quantizations_bin(count: int, percentile: float) -> None:
    """One value in each bin: its rule is the first bin whose cumulative share, added in float64, reaches the percentile."""
    calibrator = HistogramCalibrator(8, None, False, num_bins=count)
    calibrator.collect(torch.arange(1, count + 1) - 0.5)
    assert calibrator._calib_hist.tolist() == [1] * count
    total, chosen = 0.0, 0
    while (total := total + 1 / count) < percentile / 100:
        chosen += 1
    assert calibrator.compute_amax("percentile", percentile=percentile) == calibrator._calib_bin_edges[chosen]


def test_entropy_by_hand() -> None:
    """One bit and sign: two levels. Bins 5, 5, 1, 1: both levels are even, so nothing is lost by the whole range."""
    values = [0.5] * 5 + [1.5] * 5 + [2.5, 4.0]
    calibrator = HistogramCalibrator(2, None, False, num_bins=4)
    calibrator.collect(torch.tensor(values))
    assert calibrator._calib_hist.tolist() == [5, 5, 1, 1]
    assert calibrator.compute_amax("entropy", start_bin=2) == 4


def test_what_is_wrong_with_arguments() -> None:
    calibrator = counted(torch.rand(100), num_bins=100)
    of_floats = copy.copy(calibrator)
    of_floats._num_bits = (4, 3)
    of_one_level = copy.copy(calibrator)
    of_one_level._num_bits = 1
    with pytest.raises(TypeError, match="Unknown calibration method 'max'; it must be one of entropy, mse, percentile"):
        calibrator.compute_amax("max")
    for percentile in (-1, 100.5):
        with pytest.raises(ValueError, match="Invalid percentile. Must be in range 0 <= percentile <= 100, got"):
            calibrator.compute_amax("percentile", percentile=percentile)
    for method, last in (("entropy", 100), ("mse", 99)):
        with pytest.raises(
            ValueError, match=rf"start_bin must lie in \[1, {last}\] for a histogram of 100 bins, got 128"
        ):
            calibrator.compute_amax(method)
    with pytest.raises(TypeError, match=r"entropy needs integers, got num_bits=\(4, 3\)"):
        of_floats.compute_amax("entropy")
    with pytest.raises(ValueError, match="entropy needs at least two levels, got num_bits=1 with signed integers"):
        of_one_level.compute_amax("entropy")
    assert HistogramCalibrator(8, None, False).compute_amax("mse") is None


@pytest.mark.parametrize("method", ["entropy", "mse", "percentile"])
def test_channels_are_calibrated_one_by_one(method: str) -> None:
    calibrator = HistogramCalibrator(8, 1, False, num_bins=256)
    batches = [torch.randn(8, 3, 100) * torch.tensor([1.0, 10.0, 0.1])[:, None] * scale for scale in (1, 2)]
    for batch in batches:
        calibrator.collect(batch)
    amax = calibrator.compute_amax(method)
    assert amax.shape == (1, 3, 1)
    for i in range(3):
        assert amax[0, i, 0] == counted(*(b[:, i] for b in batches), num_bins=256).compute_amax(method)
    with pytest.raises(RuntimeError, match="amax shape changed!"):
        calibrator.collect(torch.ones(8, 4, 100))
    calibrator.reset()
    assert calibrator.compute_amax(method) is None


def test_calibrators_print_themselves() -> None:
    assert str(MaxCalibrator(8, None, False, track_amax=True)) == "MaxCalibrator(track_amax=True)"
    assert repr(MaxCalibrator(8, 0, True)) == "MaxCalibrator(num_bits=8, axis=0, unsigned=True)"
    assert str(HistogramCalibrator(8, None, False)) == "HistogramCalibrator(calib_bin_edges=None)"
    assert (
        str(counted(torch.tensor([2.0]), num_bins=4)) == "HistogramCalibrator(calib_bin_edges=[0.000, ..., 2.000](5))"
    )


def test_a_calibrator_of_ones_own() -> None:
    class Mean(calib._Calibrator):
        def collect(self, x: Tensor) -> None:
            self.amax = x.abs().mean()

        def compute_amax(self) -> Tensor:
            return self.amax

    calibrator = Mean(8, None, False)
    calibrator.collect(torch.tensor([1.0, -3.0]))
    assert calibrator.compute_amax() == 2
    with pytest.raises(NotImplementedError):
        calibrator.reset()


# ---- weights


class Settings:
    num_bits, unsigned, amax = 8, False, None


def with_quantizer(layer: nn.Module) -> nn.Module:
    layer.weight_quantizer = Settings()
    return layer


@pytest.mark.parametrize("method", ["percentile", "mse", "max"])
@pytest.mark.parametrize("perchannel", [True, False])
def test_weights(method: str, perchannel: bool) -> None:
    conv, deconv = with_quantizer(nn.Conv2d(3, 5, 3)), with_quantizer(nn.ConvTranspose2d(3, 5, 3))
    linear = with_quantizer(nn.Linear(7, 4))
    model = nn.Sequential(conv, deconv, linear, nn.BatchNorm1d(4))
    calib.calibrate_weights(model, method, perchannel, percentile=90.0, num_bins=300)
    shapes = {conv: (5, 1, 1, 1), deconv: (1, 5, 1, 1), linear: (4, 1)}
    for layer, shape in shapes.items():
        amax = layer.weight_quantizer.amax
        assert amax.shape == (shape if perchannel else ())
        parts = layer.weight.detach().unbind(1 if layer is deconv else 0) if perchannel else [layer.weight.detach()]
        for found, part in zip(amax.reshape(-1), parts, strict=True):
            wanted = part.abs().max() if method == "max" else None
            wanted = counted(part, num_bins=300).compute_amax(method, percentile=90.0) if wanted is None else wanted
            assert found == float(wanted)


def test_weights_have_no_entropy() -> None:
    with pytest.raises(TypeError, match="Unsupported calibration method 'entropy' of weights"):
        calib.calibrate_weights(nn.Linear(2, 2), "entropy")


# ---- clip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clip_and_its_gradients(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 1.5, 2.0, 7.0], dtype=dtype, requires_grad=True)
    low, high = torch.tensor(-1.0, requires_grad=True), torch.tensor([2.0], requires_grad=True)
    y = clip(x, low, high)
    assert y.dtype == dtype
    assert y.tolist() == [-1, -1, -0.5, 0, 1.5, 2, 2]
    y.backward(torch.tensor([1, 2, 4, 8, 16, 32, 64], dtype=dtype))
    assert x.grad.tolist() == [0, 0, 4, 8, 16, 0, 0]  # strictly inside
    assert (float(low.grad), high.grad.tolist()) == (3, [96])


def test_clip_with_fixed_bounds() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    low = torch.tensor([[-0.5], [0.0]])
    y = clip(x, low, 0.5)
    assert torch.equal(y, torch.minimum(torch.maximum(x, low), torch.tensor(0.5)))
    clipped = clip(x, low.requires_grad_(), 0.5)
    with pytest.raises(
        ValueError, match=r"Learnable min/max can only be scalar; clip_value_min requires grad, got the shape \[2, 1\]"
    ):
        clipped.sum().backward()


# ---- optim.helper


class Block(nn.Module):
    def __init__(self, downsample: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)
        if downsample:
            self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2))


def resnet18_names() -> nn.Module:
    """A module with the parameter names of torchvision's ResNet-18."""
    model = nn.Module()
    model.conv1, model.bn1, model.fc = nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Linear(2, 2)
    for i in range(4):
        setattr(model, f"layer{i + 1}", nn.Sequential(Block(i > 0), Block(False)))
    return model


def test_parameters_are_grouped_by_name() -> None:
    model = resnet18_names()
    assert len(list(model.parameters())) == 62
    groups = helper.group_parameters(
        model, [["downsample.0.weight"], ["bn1"], ["downsample.1"]], [0.1, 0.2, 0.3], (0.9, 0.8, 0.7), [1e-4, 0, 1e-5]
    )
    assert [len(group["params"]) for group in groups] == [3, 18, 6]
    assert [(g["lr"], g["momentum"], g["weight_decay"]) for g in groups] == [
        (0.1, 0.9, 1e-4), (0.2, 0.8, 0), (0.3, 0.7, 1e-5)
    ]  # fmt: skip
    torch.optim.SGD(groups, lr=1.0).step()
    matched = list(helper.match_parameters(model, ["fc", "weight$", "fc.bias"]))
    assert len(matched) == len(set(matched)) == 42  # each once


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("conv",), TypeError, "patterns_list must be list of list of patterns, got 'conv'"),
        ((["conv"],), TypeError, "patterns_list must be list of list of patterns, got ['conv']"),
        (([["conv"]], 0.1), TypeError, "lrs must be a list or None, got 0.1"),
        (([["conv"]], None, 0.9), TypeError, "momentums must be a list or None"),
        (([["conv"]], None, None, [1, 2]), TypeError, "len(weight_decays) must match len(patterns_list), got 2 and 1"),
    ],
)
def test_bad_groups_are_refused(args: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        helper.group_parameters(None, *args)  # the lists are checked before the model is read
    assert words in str(caught.value)


def test_parameters_are_frozen_by_name() -> None:
    model = resnet18_names()
    helper.freeze_parameters(model, ["bn", r"layer1\.0"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "bn" in name or name.startswith("layer1.0")}


def test_weights_are_put_on_their_grids() -> None:
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    layer._weight_quantizer = nn.Hardtanh(-0.125, 0.125)
    before, weight = other.weight.clone(), layer.weight
    helper.quant_weight_inplace(nn.Sequential(layer, other))
    assert layer.weight is weight
    assert float(weight.detach().abs().max()) <= 0.125
    assert torch.equal(other.weight, before)
