"""Files of every backend in each opset load in onnxruntime at its default optimizations, and hold the codes of training."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import nets
from tests.sessions import default_session, saturates_here

NEWEST = onnx.defs.onnx_opset_version()
NEWEST_IN_ONNXRUNTIME = 26
BACKENDS = [name for name in qt.backends if name != "nnie"]


class Net(nn.Module):
    """Convolutions with batch norm, a residual add, a deconvolution, and ops that move values in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.relu6 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU6()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(torch.relu(self.up(self.relu6(self.bn2(self.conv2(x)) + x))), 4)
        return self.fc2(torch.flatten(self.fc1(x.transpose(1, 3)), 1))


def calibrated(backend: str) -> nn.Module:
    model, x = nets.trained(Net(), 4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    prepared = qt.prepare(model, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared)


def run_file(path, x: Tensor) -> np.ndarray:
    session = default_session(path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def opset_of(path) -> int:
    (version,) = [o.version for o in onnx.load(str(path)).opset_import if o.domain in ("", "ai.onnx")]
    return version


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23, NEWEST_IN_ONNXRUNTIME])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_file_of_a_backend_runs_at_default_optimizations(tmp_path, backend: str, opset: int, exporter: str) -> None:
    model, x = calibrated(backend), torch.randn(4, 3, 8, 8)
    path = tmp_path / "m.onnx"
    if backend in ("ppl-w8a16", "litert-16x8") and opset < 21:
        with pytest.raises(ValueError, match="opset must be at least 21 for .+, which quantizes to u?int16.*, got"):
            qt.export_onnx(model, x, path, opset=opset, exporter=exporter)
        return
    if qt.backends[backend].float_type == "float16" and opset < 19:
        with pytest.raises(ValueError, match='float_type="float16" needs opset 19 or newer'):
            qt.export_onnx(model, x, path, opset=opset, exporter=exporter)
        return
    codes = qt.export_onnx(model, x, path, opset=opset, exporter=exporter).verification
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert opset_of(path) == opset
    expected = model(x).detach().numpy()
    difference = np.abs(run_file(path, x) - expected).max()
    assert difference < 0.1 * np.abs(expected).max() or saturates_here(path)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_newest_opset_is_written_though_onnxruntime_does_not_run_it(tmp_path, exporter: str) -> None:
    model, x = calibrated("tensorrt10"), torch.randn(4, 3, 8, 8)
    path = tmp_path / "m.onnx"
    with pytest.raises(RuntimeError, match="onnxruntime cannot run the file on the CPU: .+ pass verify=False"):
        qt.export_onnx(model, x, path, opset=NEWEST, exporter=exporter)
    assert not path.exists()
    qt.export_onnx(model, x, path, opset=NEWEST, exporter=exporter, verify=False)
    assert opset_of(path) == NEWEST


class Moving(nn.Module):
    """Moves quantized values: in front of a layer, twice in a row, to two layers, and to an output of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.other = nn.Conv2d(3, 8, 1), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.max_pool2d(x, 2)
        rows = self.conv(x).relu().transpose(1, 3).reshape(-1, 8)
        return self.one(rows), self.other(rows), x.squeeze(0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt10", "vitis", "tvm"])
def test_int8_codes_stay_codes_behind_ops_that_move_them(tmp_path, backend: str, exporter: str) -> None:
    x = torch.randn(1, 3, 8, 8)
    prepared = qt.prepare(Moving().eval(), backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    outputs, kinds = [], []
    for opset in (18, 21):
        qt.export_onnx(prepared, x, tmp_path / "m.onnx", opset=opset, exporter=exporter)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
        session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {session.get_inputs()[0].name: x.numpy()}))
        nodes = onnx.load(str(tmp_path / "optimized.onnx")).graph.node
        kinds.append(Counter(n.op_type for n in nodes if n.op_type not in ("QuantizeLinear", "DequantizeLinear")))
    assert kinds[0] == kinds[1]
    for old, new in zip(*outputs, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt10", "litert"])
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.cat([y[:, :4], y], 1),
        lambda y: y[:, :4] + y[:, 4:],
        lambda y: y + y.flip(1),
        lambda y: torch.cat([y.transpose(2, 3), y], 1),
    ],
    ids=["concat", "halves", "flip", "transpose"],
)
def test_a_file_with_values_that_are_moved_and_taken_as_they_are_loads(
    tmp_path, op: Callable[[Tensor], Tensor], backend: str, exporter: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.LazyConv2d(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(op(self.first(x).relu()))  # type: ignore[no-any-return]

    model, x = Net().eval(), torch.randn(1, 3, 8, 8)
    model(x)
    prepared = qt.prepare(model, x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    path = qt.export_onnx(prepared, x, tmp_path / "m.onnx", opset=21, exporter=exporter).path
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])  # its default optimizations
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = qt.convert(prepared)(x).detach().numpy()
    assert np.abs(result - expected).max() < 0.02 * np.abs(expected).max()


class Reduced(nn.Module):
    """Ops whose form changed between opset 13 and 18."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.chunk(self.conv(x), 2, 1)
        x = torch.cat([F.leaky_relu(a), b.amax((2, 3), keepdim=True) + b, F.interpolate(a, scale_factor=1.0)], 1)
        return x.mean((2, 3)) + x.sum((2, 3))


@pytest.mark.parametrize("opset", [13, 15, 17])
def test_newer_forms_are_written_in_the_older_one(tmp_path, opset: int) -> None:
    x = torch.randn(2, 4, 6, 6)
    prepared = qt.prepare(Reduced().eval(), backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx", opset=opset)
    assert opset_of(result.path) == opset
    np.testing.assert_allclose(run_file(result.path, x), qt.convert(prepared)(x).detach(), rtol=1e-4, atol=0.1)


def test_an_op_that_is_a_function_of_older_ones_is_written_out(tmp_path) -> None:
    x = torch.randn(2, 4, 6, 6)
    prepared = qt.prepare(
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.Hardswish(), nn.Conv2d(4, 4, 1)).eval(), x, "onnxruntime"
    )
    qt.calibrate(prepared, [x], progress=False)
    paths = [qt.export_onnx(prepared, x, tmp_path / f"{opset}.onnx", opset=opset).path for opset in (13, 18)]
    np.testing.assert_array_equal(*(run_file(path, x) for path in paths))


class Normed(nn.Module):
    """An op that opset 13 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


def test_an_op_without_an_older_form_is_named(tmp_path) -> None:
    x = torch.randn(2, 8)
    prepared = qt.prepare(Normed().eval(), backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    with pytest.raises(RuntimeError, match="no equivalent of this LayerNormalization.+ pass exporter='torchscript'"):
        qt.export_onnx(prepared, x, tmp_path / "m.onnx", opset=13)
    assert qt.export_onnx(prepared, x, tmp_path / "m.onnx", opset=13, exporter="torchscript").opset == 13


@pytest.mark.parametrize("opset", [12, NEWEST + 1, 18.0, "18"])
def test_an_opset_that_onnx_does_not_have(tmp_path, opset: object) -> None:
    with pytest.raises(ValueError, match=rf"opset must be a whole number in \[13, {NEWEST}\].+, got {opset!r}"):
        qt.export_onnx(calibrated("tensorrt10"), torch.randn(4, 3, 8, 8), tmp_path / "m.onnx", opset=opset)
