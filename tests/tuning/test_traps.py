"""Traps that published tables of post-training quantization show: granularity of depthwise nets, and choices of ranges."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

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


def trained_depthwise() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a net that tells four textures apart, with images and labels; its channels are made uneven, not its function."""
    torch.manual_seed(0)
    labels = torch.randint(4, (512,))
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns, rows - columns])
    images = torch.sin(1.2 * waves[labels] + 6 * torch.rand(512, 1, 1))[:, None] + 0.3 * torch.randn(512, 1, 12, 12)
    model = Depthwise()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        picked = torch.randint(512, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[picked]), labels[picked]).backward()
        optimizer.step()
    with torch.no_grad():
        for norm, after in ((model.norms[i], model.pointwise[i]) for i in range(DEPTH)):
            factor = torch.logspace(-2.2, 0.8, 16)[torch.randperm(16)]
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
            after.weight.div_(factor[None, :, None, None])
    return model.eval(), images, labels


def test_a_depthwise_net_needs_channels_or_equalization() -> None:
    model, images, labels = trained_depthwise()

    def accuracy(net: nn.Module, axis: int | None) -> float:
        w8 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=6, axis=axis)))
        prepared = qt.prepare(net, images[:1], qconfig_mapping=w8)
        qt.calibrate(prepared, [images[:64]], progress=False)
        with torch.no_grad():
            return float((prepared(images).argmax(1) == labels).float().mean())

    with torch.no_grad():
        in_float = float((model(images).argmax(1) == labels).float().mean())
    equalized = qt.tuning.equalize(model, images[:8]).model
    assert in_float > 0.95
    assert accuracy(model, None) < in_float - 0.2  # per tensor: fails outright
    assert accuracy(model, 0) > in_float - 0.03
    assert accuracy(equalized, None) > in_float - 0.03


def error_of(method: str, x: Tensor, bits: int) -> float:
    """Return the relative squared error of activations with the range that a method chooses."""
    spec = qt.QuantSpec(bits=bits, signed=False, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation=spec, weight=qt.QuantSpec()))
    prepared = qt.prepare(nn.Sequential(nn.Linear(x.size(1), 1)).eval(), qconfig_mapping=mapping)
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


def test_a_comparison_is_made_on_the_same_images() -> None:
    # The spread of a difference on the same samples is far below that of two independent accuracies.
    model, images, labels = trained_depthwise()
    w4 = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=4, axis=0)))
    prepared = qt.prepare(copy.deepcopy(model), images[:1], qconfig_mapping=w4)
    noisy = images + 1.0 * torch.randn_like(images)
    with torch.no_grad():
        right = torch.stack([(net(noisy).argmax(1) == labels).double() for net in (model, prepared)])
    paired = (right[0] - right[1]).std()
    independent = (right[0].var() + right[1].var()).sqrt()
    assert paired < independent
