"""Batch norms that are behind no layer: folded into the layers that take their outputs in eval mode, where that is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import qtoolkit as qt
from qtoolkit.export import verify
from tests import nets


class Behind(nn.Module):
    """A layer, a ReLU, a batch norm, and what takes its output."""

    def __init__(self, layer: nn.Module, norm: nn.Module, then: Callable[["Behind", Tensor], Tensor]) -> None:
        super().__init__()
        dims = {nn.BatchNorm1d: nn.Conv1d, nn.BatchNorm2d: nn.Conv2d}[type(norm)]
        self.first = nn.Linear(6, 6) if isinstance(layer, nn.Linear) else dims(6, 6, 1)
        self.norm, self.layer, self.other, self.then = norm, layer, nn.Conv2d(6, 4, 1), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, torch.relu(self.first(x)))


def plain(model: Behind, x: Tensor) -> Tensor:
    return torch.relu(model.layer(model.norm(x)))


def pruned() -> nn.Module:
    layer = nn.Conv2d(6, 4, 3)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def two_layers(model: Behind, x: Tensor) -> Tensor:
    y = model.norm(x)
    return model.layer(y) + model.other(y)


def each_time(model: Behind, x: Tensor) -> Tensor:
    return model.layer(model.norm(x)) + model.layer(model.norm(2 * x))


def padded(model: Behind, x: Tensor) -> Tensor:
    return model.layer(F.pad(model.norm(x), (1, 1, 1, 1), mode="reflect"))


def upsampled(model: Behind, x: Tensor) -> Tensor:
    return model.layer(F.interpolate(model.norm(x), scale_factor=2))


IMAGE, SOUND, ROWS = (4, 6, 8, 8), (4, 6, 16), (8, 6)
FOLDED: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Behind, Tensor], Tensor], tuple[int, ...]]] = {
    "pointwise": (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, plain, IMAGE),
    "without padding": (lambda: nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d, plain, IMAGE),
    "grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2, padding="valid"), nn.BatchNorm2d, plain, IMAGE),
    "reflected": (lambda: nn.Conv1d(6, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm1d, plain, SOUND),
    "padded by copies": (lambda: nn.Conv2d(6, 4, 3), nn.BatchNorm2d, padded, IMAGE),
    "upsampled": (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, upsampled, IMAGE),
    "linear": (lambda: nn.Linear(6, 4), nn.BatchNorm1d, plain, ROWS),
    "pruned": (pruned, nn.BatchNorm2d, plain, IMAGE),
    "two layers": (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, two_layers, IMAGE),
    "each time": (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, each_time, IMAGE),
}


def model_of(case: tuple[Any, ...]) -> tuple[nn.Module, Tensor]:
    make, norm, then, shape = case
    torch.manual_seed(0)
    model = nets.trained(Behind(make(), norm(6), then), *shape, steps=2)
    return model.eval(), torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FOLDED)
def test_it_is_folded_into_the_layers_behind_it_where_that_is_exact(name: str) -> None:
    model, x = model_of(FOLDED[name])
    prepared = qt.prepare(model, x, backend="onnxruntime")
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in prepared.modules())
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)
    if name == "pruned":
        assert (prepared.get_submodule("layer").weight == 0).sum() >= 6 * 4 * 9 // 2
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(qt.convert(prepared)(x), prepared(x))
    assert qt.debug.compare(model, prepared, x).layers


def changed(model: Behind, x: Tensor) -> Tensor:
    y = model.norm(x)
    z = x.mul_(2)
    return model.layer(y) + z[:, :4]


KEPT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "zeros": ("pads it with zeros", (lambda: nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d, plain, IMAGE)),
    "transposed": ("mixes its channels", (lambda: nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d, plain, IMAGE)),
    "relu": (
        "no quantized layer",
        (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, lambda m, x: m.layer(torch.relu(m.norm(x))), IMAGE),
    ),
    "second user": (
        "no quantized layer",
        (lambda: nn.Conv2d(6, 6, 1), nn.BatchNorm2d, lambda m, x: m.layer(y := m.norm(x)) + y, IMAGE),
    ),
    "other tensors": (
        "takes other tensors too",
        (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, lambda m, x: m.layer(m.norm(x)) + m.layer(x), IMAGE),
    ),
    "changed": ("changes a tensor in place", (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, changed, IMAGE)),
    "weight that is read": (
        "reads 'layer.weight', which folding would change",
        (lambda: nn.Linear(6, 4), nn.BatchNorm1d, lambda m, x: plain(m, x) @ m.layer.weight, ROWS),
    ),
    "mean that is read": (
        "reads 'norm.running_mean', which folding would change",
        (lambda: nn.Conv2d(6, 4, 1), nn.BatchNorm2d, lambda m, x: plain(m, x) + m.norm.running_mean.sum(), IMAGE),
    ),
    "rows in a batch": (
        "normalizes dimension 1 of 3",
        (lambda: nn.Linear(6, 4), nn.BatchNorm1d, plain, (4, 6, 6)),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_it_stays_where_folding_would_change_the_output(name: str) -> None:
    reason, case = KEPT[name]
    model, x = model_of(case)
    prepared = qt.prepare(model, x, backend="tensorrt")
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert reason in reasons["norm"], reasons["norm"]
    nets.assert_float_when_off(prepared, model, x)


def test_a_dtype_that_is_read_is_no_reason() -> None:
    model, x = model_of(
        (lambda: nn.Linear(6, 4), nn.BatchNorm1d, lambda m, x: plain(m, x.to(m.layer.weight.dtype)), ROWS)
    )
    prepared = qt.prepare(model, x, backend="onnxruntime")
    assert not any(isinstance(module, nn.BatchNorm1d) for module in prepared.modules())


def test_the_users_choices_hold() -> None:
    model, x = model_of(FOLDED["pointwise"])
    for backend in ("onnxruntime", "tensorrt"):
        prepared = qt.prepare(model, x, backend=backend, exclude="norm")
        assert isinstance(prepared.get_submodule("norm"), nn.BatchNorm2d)
    handle = model.norm.register_forward_hook(lambda *args: None)
    assert isinstance(qt.prepare(model, x, backend="onnxruntime").get_submodule("norm"), nn.BatchNorm2d)
    handle.remove()
    report = qt.quantization_report(qt.prepare(model.train(), x, backend="onnxruntime"))
    (line,) = (line for line in report.left_float if line.name == "norm")
    assert "in training mode layers take over only a batch norm after them" in line.reason


# ---- depthwise convolutions


class Levels(nn.Module):
    """A convolution that all levels share, with a batch norm for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(6, 6, 3, padding=1), nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))
        self.head = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [x, F.max_pool2d(x, 2)]
        found = [torch.relu(norm(self.conv(level))) for norm, level in zip(self.norms, levels, strict=True)]
        return [self.head(level).sigmoid() for level in found]


def residual(model: Behind, x: Tensor) -> Tensor:
    return torch.relu(model.layer(model.norm(x) + x))


SCALED: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "zeros": lambda: (Behind(nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(6), plain), IMAGE),
    "sound": lambda: (Behind(nn.Conv1d(6, 4, 3, padding=1), nn.BatchNorm1d(6), plain), SOUND),
    "second user": lambda: (Behind(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), residual), IMAGE),
    "levels": lambda: (Levels(), IMAGE),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SCALED)
def test_onnxruntime_computes_it_as_a_depthwise_convolution(tmp_path, name: str, bits: int) -> None:
    torch.manual_seed(0)
    model, shape = SCALED[name]()
    model = nets.trained(model, *shape, steps=2).eval()
    next(m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)).weight.data[0] = 0
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=bits, axis=0)))
    prepared = qt.prepare(model, x, backend="onnxruntime", qconfig_mapping=mapping)
    scales = [line.name for line in qt.quantization_report(prepared).layers if "norm" in line.name]
    assert scales == (["norms.0", "norms.1"] if name == "levels" else ["norm"])
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)
    qt.calibrate(prepared, [x], progress=False)
    layer = prepared.get_submodule(scales[0])
    torch.testing.assert_close(layer.quantize_weight(layer.weight), layer.weight, rtol=1e-6, atol=0)
    converted = qt.convert(prepared)
    torch.testing.assert_close(converted(x), prepared(x), rtol=0, atol=0)
    assert qt.debug.compare(model, prepared, x).layers
    integer = qt.convert(prepared, arithmetic="integer")
    found = verify(integer, x, qt.export_onnx(converted, x, tmp_path / "m.onnx").path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0
    assert {*scales, "conv" if name == "levels" else "first"} <= {*found.on_codes}


# ---- a speaker net


class Tdnn(nn.Sequential):
    """A convolution, a ReLU and a batch norm, in this order."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel - 1) // 2
        conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding=padding)
        super().__init__(conv, nn.ReLU(), nn.BatchNorm1d(outputs))


class Res2Net(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.before, self.after = Tdnn(channels, channels), Tdnn(channels, channels)
        self.blocks = nn.ModuleList(Tdnn(channels // 4, channels // 4, 3, dilation) for _ in range(3))
        self.squeeze = nn.Sequential(nn.Conv1d(channels, 4, 1), nn.ReLU(), nn.Conv1d(4, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        first, *parts = self.before(x).chunk(4, 1)
        outputs = [first]
        for block, part in zip(self.blocks, parts, strict=True):
            outputs.append(block(part + outputs[-1] if len(outputs) > 1 else part))
        y = self.after(torch.cat(outputs, 1))
        return y * self.squeeze(y.mean(2, keepdim=True)) + x


class Speaker(nn.Module):
    """Convolutions with batch norms behind their ReLUs, as in ECAPA-TDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = Tdnn(8, 16, 5), Res2Net(16, 2), Res2Net(16, 3)
        self.join = Tdnn(32, 24)
        self.attention = nn.Sequential(Tdnn(24, 8), nn.Tanh(), nn.Conv1d(8, 24, 1))
        self.norm, self.out = nn.BatchNorm1d(48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.one(x)
        y = self.join(torch.cat([y, self.two(x + y)], 1))
        weights = self.attention(y).softmax(2)
        mean = (weights * y).sum(2)
        deviation = ((weights * y.square()).sum(2) - mean.square()).clamp(min=1e-4).sqrt()
        return self.out(self.norm(torch.cat([mean, deviation], 1)))


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("training", [True, False])
def test_a_speaker_net_runs_in_integers(tmp_path, training: bool, quantizer: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(1))
    model = nets.trained(Speaker(), 4, 8, 40).train(training)
    spec = qt.QuantSpec(quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec.with_(axis=0)))
    prepared = qt.prepare(model, x, backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        prepared.train()(x).square().mean().backward()
        optimizer.step()
    converted = qt.convert(prepared.eval())
    assert torch.equal(converted(x), prepared(x))
    norms = [name for name, m in converted.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == (14 if training else 0)
    integer = qt.convert(prepared, arithmetic="integer")
    found = verify(integer, x, qt.export_onnx(converted, x, tmp_path / "m.onnx").path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0
    in_float = {each.kernel for each in found.float_layers}
    assert not in_float & {"Conv", "FusedConv", "Gemm", "MatMul"}
    assert ("BatchNormalization" in in_float) == training
