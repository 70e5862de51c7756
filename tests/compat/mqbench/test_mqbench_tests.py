"""What MQBench's own tests do, with the import changed: each runs whole, and beyond that its result is checked.

Their networks are smaller here.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.compat.mqbench.convert_deploy import convert_deploy, convert_merge_bn
from qtoolkit.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform
from qtoolkit.compat.mqbench.utils.state import enable_calibration, enable_quantization

models = pytest.importorskip("torchvision.models")
SHAPE = (2, 3, 32, 32)
FOUR_BITS = {"bit": 4, "symmetry": True, "per_channel": False, "pot_scale": False}
FIXED = {
    "w_observer": "MinMaxObserver",
    "a_observer": "EMAMinMaxObserver",
    "w_fakequantize": "FixedFakeQuantize",
    "a_fakequantize": "FixedFakeQuantize",
}
LEARNABLE = {**FIXED, "w_fakequantize": "LearnableFakeQuantize", "a_fakequantize": "LearnableFakeQuantize"}


def resnet() -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


def trained(model: nn.Module, backend: BackendType, extra: dict | None = None) -> nn.Module:
    """Prepare, calibrate, quantize, one step of gradients."""
    prepared = prepare_by_platform(model.train(), backend, {"extra_qconfig_dict": extra or {}})
    x = torch.randn(SHAPE)
    enable_calibration(prepared)
    prepared(x)
    enable_quantization(prepared)
    prepared(x).sum().backward()
    assert any(parameter.grad is not None for parameter in prepared.parameters())
    return prepared.eval()


def deployed(prepared: nn.Module, backend: BackendType, folder: Path) -> list[str]:
    shapes = {"x": [1, *SHAPE[1:]]}
    return [file.name for file in convert_deploy(prepared, backend, shapes, output_path=folder, model_name="net")]


# ---- backends

QDQ, OWN = "net.onnx", ("net_deploy_model.onnx", "net_clip_ranges.json")
FILES = {
    "Academic": [QDQ],
    "Academic_NLP": [QDQ],
    "QDQ": [QDQ],
    "Tensorrt": [QDQ, "net_deploy_model.onnx", "net_calibration.cache", "net_clip_ranges.json"],
    "Tensorrt_NLP": [QDQ],
    "NNIE": ["net_deploy_model.onnx", "net_gfpq_param_dict.json"],
    "OPENVINO": [QDQ, "net.xml", "net.bin"],
    "SNPE": [QDQ, *OWN],
    "PPLW8A16": [QDQ, *OWN],
    "PPLCUDA": [QDQ, *OWN],
    "ONNX_QNN": [QDQ, *OWN],
    "Vitis": [QDQ, *OWN],
    "STPU": [QDQ, "net_for_stpu.onnx", "net_stpu_minmax.json"],
    "Tengine_u8": [QDQ, "net_for_tengine.onnx", "net_for_tengine.scale"],
}
ACADEMIC = {**FIXED, "a_fakequantize": "LearnableFakeQuantize", "w_qscheme": FOUR_BITS, "a_qscheme": FOUR_BITS}


class Small(nn.Module):
    """A residual block, a deconvolution with its batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.next, self.up, self.norm = nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(torch.relu(self.bn(self.conv(x))), 2)
        y = torch.relu(self.norm(self.up(torch.relu(self.next(y) + y))))
        return self.fc(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


def test_every_backend_has_a_case() -> None:
    assert FILES.keys() == {backend.name for backend in BackendType}


@pytest.mark.filterwarnings("ignore:encodings. .* differ from the trained scales")  # of learned scales
@pytest.mark.parametrize("name", FILES)
def test_quantize_backend(name: str, tmp_path) -> None:
    if name == "OPENVINO":
        pytest.importorskip("openvino")
    backend = BackendType[name]
    prepared = trained(Small(), backend, ACADEMIC if name.startswith("Academic") else None)
    with torch.no_grad():
        before = prepared(torch.ones(SHAPE))
    assert deployed(prepared, backend, tmp_path) == FILES[name]
    assert {file.name for file in tmp_path.iterdir()} == set(FILES[name])
    with torch.no_grad():
        assert torch.equal(prepared(torch.ones(SHAPE)), before)
    target = prepared.plan.backend.name
    if len(FILES[name]) > 1:
        grids = {name: grid for name, grid in qt.convert(prepared).named_modules() if isinstance(grid, qt.Grid)}
        scales = {tuple(grid.scale.reshape(-1).tolist()) for grid in grids.values()}
        read = qt.export.read_encodings(target, tmp_path / "net")
        assert len(read) >= 6
        close = name == "OPENVINO"  # whose ends are float32
        assert close or {encoding.scale for encoding in read} <= scales


@pytest.mark.slow
def test_quantize_tensorrt_resnet(tmp_path) -> None:
    prepared = trained(resnet(), BackendType.Tensorrt, FIXED)
    assert deployed(prepared, BackendType.Tensorrt, tmp_path) == FILES["Tensorrt"]


# ---- fake quantizers

FAKE_QUANTIZERS = {
    "fixed": (BackendType.Tensorrt, FIXED, "fixed", "fixed"),
    "learnable": (BackendType.Tensorrt, LEARNABLE, "lsq", "lsq"),
    "nnie": (
        BackendType.NNIE,
        {**FIXED, "w_fakequantize": "NNIEFakeQuantize", "a_fakequantize": "NNIEFakeQuantize"},
        "fixed",
        "fixed",
    ),
    "dorefa": (
        BackendType.Tensorrt,
        {**LEARNABLE, "w_fakequantize": "DoReFaFakeQuantize", "w_qscheme": {**FOUR_BITS, "per_channel": True}},
        "dorefa",
        "lsq",
    ),
    "pact": (BackendType.Tensorrt, {**FIXED, "a_fakequantize": "PACTFakeQuantize"}, "fixed", "pact"),
    "dsq": (
        BackendType.Tensorrt,
        {
            "w_observer": "ClipStdObserver",
            "a_observer": "ClipStdObserver",
            "w_fakequantize": "DSQFakeQuantize",
            "a_fakequantize": "DSQFakeQuantize",
        },
        "dsq",
        "dsq",
    ),
    "qdrop": (BackendType.Tensorrt, {**FIXED, "a_fakequantize": "QDropFakeQuantize"}, "fixed", "lsq"),
    "tqt": (
        BackendType.Vitis,
        {"w_fakequantize": "TqtFakeQuantize", "a_fakequantize": "TqtFakeQuantize"},
        "tqt",
        "tqt",
    ),
}


@pytest.mark.parametrize("name", FAKE_QUANTIZERS)
def test_fake_quantize(name: str) -> None:
    backend, extra, weight, activation = FAKE_QUANTIZERS[name]
    prepared = trained(Small(), backend, extra)
    quantizers = qt.quantizers_of(prepared).values()
    assert {quantizer.spec.quantizer for quantizer in quantizers if quantizer.of_weight} == {weight}
    assert {quantizer.spec.quantizer for quantizer in quantizers if not quantizer.of_weight} == {activation}
    with torch.no_grad():
        assert torch.isfinite(qt.convert(prepared)(torch.randn(SHAPE))).all()


# ---- observers


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("MinMaxObserver", "EMAQuantileObserver"),
        ("MinMaxObserver", "EMAMinMaxObserver"),
        ("MinMaxObserver", "MinMaxObserver"),
        ("LSQObserver", "LSQObserver"),
        ("ClipStdObserver", "ClipStdObserver"),
        ("MSEObserver", "EMAMSEObserver"),
    ],
)
def test_observer(weight: str, activation: str) -> None:
    prepared = trained(Small(), BackendType.Tensorrt, {**FIXED, "w_observer": weight, "a_observer": activation})
    assert all(quantizer.ready for quantizer in qt.quantizers_of(prepared).values())


# ---- checkpoints, merged batch norms, models with dicts, the zoo


@pytest.mark.slow
def test_load_checkpoint(tmp_path) -> None:
    x, path = torch.randn(SHAPE), tmp_path / "saved_model.ckpt"
    first = prepare_by_platform(resnet(), BackendType.Tensorrt, {"extra_qconfig_dict": LEARNABLE}).train()
    enable_calibration(first)
    first(x)
    enable_quantization(first)
    expected = first.eval()(x)
    torch.save(first.state_dict(), path)
    second = prepare_by_platform(resnet(), BackendType.Tensorrt, {"extra_qconfig_dict": LEARNABLE})
    second.load_state_dict(torch.load(path))
    enable_quantization(second)
    assert torch.equal(second.eval()(x), expected)


class Deconvolutions(nn.Module):
    """Convolutions and max pools with positions, then deconvolutions and unpools that take the positions and the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 16, 4), nn.Conv2d(16, 32, 5), nn.Conv2d(32, 64, 3)
        self.up1, self.up2, self.up3 = (
            nn.ConvTranspose2d(64, 32, 3),
            nn.ConvTranspose2d(32, 16, 5),
            nn.ConvTranspose2d(16, 3, 4),
        )
        self.bn1, self.bn3 = nn.BatchNorm2d(32), nn.BatchNorm2d(3)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(x))
        outer = y.size()
        y, positions = self.pool(y)
        y = torch.relu(self.conv2(y))
        inner = y.size()
        y, deeper = self.pool(y)
        y = torch.relu(self.bn1(self.up1(torch.relu(self.conv3(y)))))
        y = torch.relu(self.up2(self.unpool(y, deeper, inner)))
        return self.bn3(self.up3(self.unpool(y, positions, outer)))


@pytest.mark.parametrize("build", [models.mobilenet_v2, Deconvolutions], ids=["mobilenet_v2", "deconvolutions"])
def test_merge_bn(build) -> None:
    x = torch.randn(1, 3, 64, 64)
    prepared = prepare_by_platform(build(), BackendType.Tensorrt, {"extra_qconfig_dict": LEARNABLE}).train()
    enable_calibration(prepared)
    prepared(x)
    enable_quantization(prepared)
    expected = prepared.eval()(x).flatten()
    convert_merge_bn(prepared)
    found = prepared(x).flatten()
    assert torch.cosine_similarity(found, expected, 0) >= 0.999
    assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.modules())


class OneStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, 3)

    def forward(self, input: dict) -> dict:
        input.update({"y": {"z": self.conv(input["x"])}})
        return input


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = (
            nn.Conv2d(3, 3, 3),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 3, 3),
            nn.BatchNorm2d(3),
        )

    def forward(self, input: dict) -> dict:
        input.update({"y": self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(input["x"])))))})
        return input


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, input: dict) -> dict:
        input.update({"z": self.conv(input["y"])})
        return input


class TwoStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), Head()

    def forward(self, input: dict) -> dict:
        input.update(self.backbone(input))
        input.update(self.head(input))
        return input


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "backend", "output"),
    [(OneStage, BackendType.PPLW8A16, lambda y: y["y"]["z"]), (TwoStage, BackendType.SNPE, lambda y: y["z"])],
)
def test_models_that_update_a_dict(build, backend: BackendType, output, tmp_path) -> None:
    prepared, x = prepare_by_platform(build().train(), backend), torch.randn(SHAPE)
    enable_calibration(prepared)
    prepared({"x": x})
    enable_quantization(prepared)
    output(prepared({"x": x})).sum().backward()
    files = convert_deploy(prepared.eval(), backend, dummy_input={"x": x}, output_path=tmp_path, model_name="net")
    assert [file.name for file in files] == [QDQ, *OWN]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet1_1", pytest.param("shufflenet_v2_x0_5", marks=pytest.mark.sweep)])
@pytest.mark.filterwarnings("ignore:encodings")
def test_the_zoo_deploys(name: str, tmp_path) -> None:
    x = torch.randn(2, 3, 64, 64)
    prepared = prepare_by_platform(models.get_model(name, weights=None).train(), BackendType.PPLW8A16)
    enable_calibration(prepared)
    prepared(x)
    enable_quantization(prepared)
    prepared(x).sum().backward()
    shapes = {"x": [1, 3, 64, 64]}
    files = convert_deploy(prepared.eval(), BackendType.PPLW8A16, shapes, output_path=tmp_path, model_name="net")
    assert [file.name for file in files] == [QDQ, *OWN]
