"""Traps that published tables show: granularity of depthwise nets, choices of ranges, and small test sets."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from benchmarks.pages.post_training.hits import accuracy, difference, hits_of
from qtoolkit.tuning.runs import batches

DEPTH = 3


class Depthwise(nn.Module):
    """Separable convolutions, whose channels have ranges of very different sizes, as in a trained MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.depthwise = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(DEPTH))
        self.pointwise = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(DEPTH))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for depthwise, norm, pointwise in zip(self.depthwise, self.norms, self.pointwise, strict=True):
            x = F.relu(pointwise(F.relu(norm(depthwise(x)))))
        return self.head(x.mean((2, 3)))


def trained(model: nn.Module, x: Tensor, labels: Tensor, steps: int, rate: float) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        picked = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[picked]), labels[picked]).backward()
        optimizer.step()
    return model.eval()


def trained_depthwise() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a net that tells four textures apart, with images and labels; its channels are made uneven, not its function."""
    torch.manual_seed(0)
    labels = torch.randint(4, (512,))
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns, rows - columns])
    images = torch.sin(1.2 * waves[labels] + 6 * torch.rand(512, 1, 1))[:, None] + 0.3 * torch.randn(512, 1, 12, 12)
    model = trained(Depthwise(), images, labels, 80, 1e-2)
    with torch.no_grad():
        for norm, after in ((model.norms[i], model.pointwise[i]) for i in range(DEPTH)):
            factor = torch.logspace(-2.1, 0.7, 16)[torch.randperm(16)]
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
            after.weight.div_(factor[None, :, None, None])
    return model, images, labels


@pytest.mark.slow
def test_a_depthwise_net_needs_channels_or_equalization() -> None:
    model, images, labels = trained_depthwise()

    def accuracy_of(net: nn.Module, axis: int | None) -> float:
        w8 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(axis=axis)))
        prepared = qt.prepare(net, images[:1], qconfig_mapping=w8, backend="tensorrt10")
        qt.calibrate(prepared, [images[:64]], progress=False)
        with torch.no_grad():
            return float((prepared(images).argmax(1) == labels).float().mean())

    with torch.no_grad():
        in_float = float((model(images).argmax(1) == labels).float().mean())
    equalized = qt.tuning.equalize(model, images[:8]).model
    assert in_float > 0.95
    assert accuracy_of(model, None) < in_float - 0.2  # per tensor: fails outright
    assert accuracy_of(model, 0) > in_float - 0.03
    assert accuracy_of(equalized, None) > in_float - 0.03


@pytest.mark.slow
def test_trained_scales_rescue_a_depthwise_net_per_tensor() -> None:
    model, images, labels = trained_depthwise()
    learned = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(axis=None, quantizer="lsq")))
    prepared = qt.prepare(copy.deepcopy(model).train(), images[:1], qconfig_mapping=learned, backend="tensorrt10")
    qt.calibrate(prepared, [images[:64]], progress=False)
    in_float, before = (accuracy(hits_of(net.eval(), images, labels)) for net in (model, prepared))
    qt.freeze_batch_norm(prepared.train())
    trained(prepared, images, labels, 60, 3e-3)
    assert before < in_float - 20  # per tensor, eight bits
    assert accuracy(hits_of(prepared, images, labels)) > in_float - 3


def error_of(method: str, x: Tensor, bits: int) -> float:
    """Return the relative squared error of activations with the range that a method chooses."""
    spec = qt.QuantSpec(bits=bits, signed=False, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation=spec, weight=qt.QuantSpec(axis=None)))
    prepared = qt.prepare(nn.Sequential(nn.Linear(x.size(1), 1)).eval(), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [x], method=method, progress=False)
    quantizer = qt.quantizers_of(prepared)["activation_quantizers.input_1"]
    return float((quantizer(x) - x).square().sum() / x.square().sum())


@pytest.mark.filterwarnings("ignore:calibrate. the ranges")
@pytest.mark.parametrize("bits", [4, 8])
def test_mse_is_the_safest_choice_of_ranges(bits: int) -> None:
    # Swish nets have rare large values, for which the maximum is unsafe; flat distributions are unsafe for KL.
    with_outliers = F.silu(torch.randn(2000, 16))
    with_outliers[::500, 0] = 60.0
    kinds = [with_outliers, F.relu(torch.randn(2000, 16)), torch.rand(2000, 16), F.relu6(4 * torch.randn(2000, 16))]
    methods = ("minmax", "entropy", "percentile", "mse")
    errors = torch.tensor([[error_of(method, x, bits) for x in kinds] for method in methods])
    ratios = errors / errors.amin(0)
    worst = dict(zip(methods, ratios.amax(1).tolist(), strict=True))
    assert worst["mse"] < 1.1
    assert bits == 8 or worst["minmax"] > 1.5
    assert all(worst["mse"] <= worst[method] for method in methods)


def test_padding_makes_squared_error_unsafe() -> None:
    # Texts of 11 tokens, the first of which has one large feature, as [CLS] has in a BERT; padding has none.
    torch.manual_seed(0)
    text, padding = 0.6 * torch.randn(64, 11, 384), 0.6 * torch.randn(64, 117, 384)
    text[:, 0, 0] = 12.0
    errors = {}
    for name, x in {"text": text, "padded": torch.cat((text, padding), 1)}.items():
        for method in ("minmax", "mse"):
            prepared = qt.prepare(nn.Sequential(nn.Linear(384, 1)).eval(), text, backend="onnxruntime")
            qt.calibrate(prepared, x.split(16), method=method, progress=False)
            quantizer = qt.quantizers_of(prepared)["activation_quantizers.input_1"]
            errors[name, method] = float((quantizer(text) - text).square().mean())
    assert errors["text", "mse"] < errors["text", "minmax"]
    assert errors["padded", "mse"] > 1.3 * errors["padded", "minmax"]


def with_long_tails() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a net for samples of small values and a rare large one, whose size is the class, as in EfficientNet-Lite0."""
    labels, width = torch.randint(4, (4096,)), 512
    x = 0.3 * torch.randn(4096, width).abs()
    x[torch.arange(4096), torch.randint(width, (4096,))] = 10.0 * (labels + 1) + 2 * torch.randn(4096)
    x = F.relu(x)
    return trained(nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 4)), x, labels, 300, 1e-2), x, labels


def swish_with_outliers() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a swish net for samples with rare outliers that say nothing about the class."""
    labels, centers = torch.randint(8, (4096,)), torch.randn(8, 64)
    x = centers[labels] + 2.2 * torch.randn(4096, 64)
    x = torch.where(torch.rand_like(x) < 1 / 8192, 60.0, x)
    layers = nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)
    return trained(nn.Sequential(*layers), x, labels, 200, 3e-3), x, labels


def accuracy_by_method(model: nn.Module, x: Tensor, labels: Tensor, bits: int) -> dict[str, float]:
    """Return the accuracy in float, and with the ranges of each method for activations."""
    config = qt.QConfig(qt.QuantSpec(bits=bits, signed=False, symmetric=False), qt.QuantSpec(axis=0))
    mapping = qt.QConfigMapping().set_global(config)
    nets = {"float": model}
    for method in ("minmax", "entropy", "mse"):
        nets[method] = qt.prepare(model, x[:2], backend="onnxruntime", qconfig_mapping=mapping)
        qt.calibrate(nets[method], x[:1024].split(128), method=method, progress=False)
    with torch.no_grad():
        return {name: float((net(x).argmax(1) == labels).float().mean()) for name, net in nets.items()}


@pytest.mark.filterwarnings("ignore:calibrate. the ranges")
def test_kl_is_unsafe_where_the_tail_decides_and_squared_error_is_not() -> None:
    found = accuracy_by_method(*with_long_tails(), bits=8)
    assert found["entropy"] < found["float"] - 0.15  # on EfficientNet-Lite0: 31 instead of 75 %
    assert found["minmax"] > found["float"] - 0.02
    assert found["mse"] > found["float"] - 0.02


@pytest.mark.filterwarnings("ignore:calibrate. the ranges")
def test_the_maximum_is_unsafe_on_a_swish_net_and_squared_error_is_not() -> None:
    found = accuracy_by_method(*swish_with_outliers(), bits=3)
    assert found["minmax"] < found["float"] - 0.2  # on EfficientNet-B0: 22 instead of 77 %
    assert found["entropy"] > found["float"] - 0.04
    assert found["mse"] > found["float"] - 0.04


def test_a_comparison_is_made_on_the_same_images() -> None:
    # The spread of a difference on the same samples is far below that of two independent accuracies.
    model, images, labels = trained_depthwise()
    w4 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=4, axis=0)))
    prepared = qt.prepare(copy.deepcopy(model), images[:1], qconfig_mapping=w4, backend="tensorrt10")
    noisy = images + 1.0 * torch.randn_like(images)
    in_float, quantized = (hits_of(net, noisy, labels) for net in (model, prepared))
    paired = difference(quantized, in_float)
    independent = 100 * ((in_float.double().var() + quantized.double().var()) / len(labels)).sqrt()
    assert 0 < paired.error < independent


def test_few_images_overstate_and_turn_the_sign_of_a_small_difference() -> None:
    # Two models of 88.0 and 88.5 %, which differ on 3.5 % of the images.
    better = torch.rand(1_000_000) < 0.885
    chance = torch.rand(1_000_000)
    worse = torch.where(better, chance > 0.02 / 0.885, chance < 0.015 / 0.115)
    found = [difference(a, b) for a, b in zip(better.split(1000), worse.split(1000), strict=True)]
    assert max(accuracy(hits) for hits in better.split(1000)) > 90.5  # a lucky subset overstates
    turned = [each for each in found if each.points < 0]
    assert len(turned) > 0.1 * len(found)
    assert sum(each.decided for each in turned) < 0.025 * len(found)  # and is marked as undecided
    assert all(str(each).endswith("~") for each in turned if not each.decided)
    in_doubt = sum(abs(each.points - 0.5) > 2 * each.error for each in found)
    assert 0.02 * len(found) < in_doubt < 0.08 * len(found)  # as of a normal distribution: 4.6 %
    whole = difference(better, worse)
    assert whole.decided
    assert whole.points > 0
    assert not str(whole).endswith("~")


def tune(method: str) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4)).eval(),
        torch.randn(8, 4),
    )
    options = {"steps": 1} if method == "reconstruct" else {}
    if method not in ("reestimate_batch_norm", "smooth_quant"):
        model = qt.prepare(model, x, backend="tensorrt10")
        qt.calibrate(model, [x], progress=False)
    getattr(qt.tuning, method)(model, [x], progress=False, **options)


@pytest.mark.parametrize("method", ["bias_correction", "gptq", "reconstruct", "reestimate_batch_norm", "smooth_quant"])
def test_several_processes_are_told_that_nothing_is_merged(method: str, monkeypatch) -> None:
    monkeypatch.setattr(batches, "ranks", lambda: 4)
    words = rf"^{method}: this process tunes its model on its own batches, without communication with the other 3 of its group"
    with pytest.warns(UserWarning, match=words) as found:
        tune(method)
    assert Path(found[0].filename) == Path(__file__)


@pytest.mark.parametrize("name", ["gptq", "bias_correction", "reconstruct"])
def test_a_batch_that_is_not_finite_is_an_error_and_the_model_is_as_before(name: str) -> None:
    """A bias became NaN, and units were kept rounded to nearest without a word."""
    w3 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=3, axis=0)))
    prepared = qt.prepare(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), qconfig_mapping=w3, backend="tensorrt10"
    )
    batches = [torch.randn(16, 8) for _ in range(2)]
    qt.calibrate(prepared, batches, progress=False)
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    batches[1][0, 0] = torch.nan
    with pytest.raises(ValueError, match=rf"^{name}: the (in|out)put of .*'0'.* has NaN or infinities on a batch"):
        getattr(qt.tuning, name)(prepared, batches, progress=False)
    torch.testing.assert_close(dict(prepared.state_dict()), before, rtol=0, atol=0)


class Mixed(nn.Module):
    """An attention, a function that takes a weight, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(F.relu(F.linear(x, self.weight)))


def test_every_quantized_weight_that_a_method_leaves_out_is_named() -> None:
    x, w3 = torch.randn(4, 3, 8), qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=3, axis=0)))
    prepared = qt.prepare(Mixed().eval(), x, qconfig_mapping=w3, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    function = "it is a function with a weight argument; use a layer, which owns its weight"
    attention = "it is a QuantMultiheadAttention, and only linear layers are supported"
    assert qt.tuning.gptq(copy.deepcopy(prepared), [x], progress=False).skipped == {
        "attention": attention,
        "linear": function,
    }
    assert qt.tuning.bias_correction(prepared, [x], progress=False).skipped == {
        "attention": "biases of kind 'attention' are not corrected",
        "linear": function,
    }
