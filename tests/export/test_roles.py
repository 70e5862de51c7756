"""Each role in onnxruntime: the codes of shared scales, weights of functions, unsigned grids, and every kind that moves."""

from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.graph.passes.test_insert import Dense
from tests.graph.test_lint import Block, Inception, UNet

IMAGE = (2, 4, 4, 4)
NLP = ("academic-nlp", "tensorrt-nlp")
CONVOLUTIONS_ALONE = [(net, name) for net in (UNet, Inception) for name in NLP]  # nothing to quantize


class Op(nn.Module):
    """An op between two convolutions."""

    def __init__(self, op: Callable[..., Tensor], channels: int = 4) -> None:
        super().__init__()
        self.op = op
        self.a, self.b, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(channels, 3, 1)
        self.weight, self.up = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.randn(4, 2, 2, 2))
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.last(self.op(self, x, F.relu(self.b(x))))


def exported(
    model: nn.Module, shape: tuple[int, ...], path: Any, backend: str, exporter: str = "dynamo"
) -> qt.ExportResult:
    prepared = qt.prepare(model.eval(), torch.randn(shape), backend=backend)
    qt.calibrate(prepared, [torch.randn(shape)], progress=False)
    # Beyond the calibrated range: what does not share a scale or saturates elsewhere shows.
    result = qt.export_onnx(prepared, 3 * torch.randn(shape), path / "model.onnx", exporter=exporter)
    codes = result.verification
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert codes.missing == ()
    lines = [line for line in qt.quantization_report(prepared).tensors if line.source != "token"]  # Block's, a constant
    assert set(codes.by_quantizer) == {line.quantizer for line in lines}
    nodes = [n.name for n in onnx.load(str(result.path)).graph.node if n.op_type == "QuantizeLinear"]
    assert sum("activation_quantizers." in name for name in nodes) >= len(lines)
    return result


OPS: dict[str, tuple[Any, int]] = {
    "cat": (lambda m, x, y: torch.cat([x, y], 1), 8),
    "cat of moved": (lambda m, x, y: torch.cat([F.max_pool2d(x, 2), F.interpolate(y, scale_factor=0.5)], 1), 8),
    "stack": (lambda m, x, y: torch.stack([x, y], 2).flatten(1, 2), 8),
    "add": (lambda m, x, y: x + y, 4),
    "by a number": (lambda m, x, y: y / 3, 4),
    "by a parameter": (lambda m, x, y: y * m.matrix, 4),
    "mul": (lambda m, x, y: x * torch.sigmoid(y), 4),
    "matmul": (lambda m, x, y: x @ y.transpose(2, 3), 4),
    "einsum": (lambda m, x, y: torch.einsum("bchw,bcwo->bcho", x, y), 4),
    "attention": (lambda m, x, y: F.scaled_dot_product_attention(x, y, y), 4),
    "conv of a parameter": (lambda m, x, y: F.conv2d(y, m.weight, padding=1), 4),
    "grouped transposed": (lambda m, x, y: F.conv_transpose2d(y, m.up, None, 2, groups=2), 4),
    "matmul with a parameter": (lambda m, x, y: y @ m.matrix, 4),
    "parameter times": (lambda m, x, y: m.matrix @ y, 4),
    "transposed parameter": (lambda m, x, y: y @ m.matrix.t(), 4),
    "zero pad": (lambda m, x, y: F.pad(y, (1, 2, 1, 0)), 4),
    "reflect": (lambda m, x, y: F.pad(y, (1, 1, 1, 1), mode="reflect"), 4),
    "pixel_shuffle": (lambda m, x, y: F.pixel_shuffle(y, 2), 1),
    "chunk": (lambda m, x, y: y.chunk(2, 1)[1], 2),
    "permute": (lambda m, x, y: y.permute(0, 2, 3, 1), 4),
    "slice": (lambda m, x, y: y[:, :2], 2),
    "avg_pool": (lambda m, x, y: F.avg_pool2d(y, 2), 4),
    "upsample": (lambda m, x, y: F.interpolate(y, scale_factor=2, mode="bilinear"), 4),
    "silu": (lambda m, x, y: F.silu(m.a(y)), 4),
}


INTEGER = [name for name, backend in qt.backends.items() if backend.qconfig.activation.format == "int"]


EXPORTERS = ["dynamo", "torchscript"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "openvino", "vitis"])
@pytest.mark.parametrize("name", OPS)
def test_codes_of_each_kind(tmp_path, name: str, backend: str, exporter: str) -> None:
    op, channels = OPS[name]
    exported(Op(op, channels), IMAGE, tmp_path, backend, exporter)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("net", "backend"),
    [(net, name) for net in (UNet, Inception, Block) for name in INTEGER if (net, name) not in CONVOLUTIONS_ALONE],
)
def test_codes_of_small_nets(tmp_path, net: type[nn.Module], backend: str, exporter: str) -> None:
    channels = 4 if net is Inception else 3
    exported(net(), (2, channels, 8, 8), tmp_path, backend, exporter)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_call_of_a_shared_scale_is_compared(tmp_path, exporter: str) -> None:
    result = exported(Dense(), (2, 2, 4, 4), tmp_path, "onnxruntime", exporter)
    assert result.verification.by_quantizer["activation_quantizers.cat"].compared == 3 * 2 * 2 * 16
    scales = {
        node.input[1]
        for node in onnx.load(str(result.path)).graph.node
        if node.op_type == "QuantizeLinear" and node.name.startswith("activation_quantizers.cat.")
    }
    assert len(scales) == 1


def test_quantizers_of_equal_scales_keep_their_names(tmp_path) -> None:
    # The exporter's optimizer lets equal constants be one.
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    prepared = qt.prepare(model, backend="vitis")
    x = torch.randn(8, 4)
    qt.calibrate(prepared, [x], progress=False)
    for quantizer in qt.quantizers_of(prepared).values():
        quantizer.amax = 127 / 64
    result = qt.export_onnx(prepared, x, tmp_path / "model.onnx")
    assert result.verification.quantizer_codes.compared == 3 * 32
    assert result.verification.weight_codes.compared == 2 * 16


def test_an_op_computed_twice_is_compared_though_the_file_computes_it_once(tmp_path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.cat([self.a(x), self.a(x)], 1))

    result = exported_once(Twice().eval(), tmp_path)
    assert result.verification.by_quantizer["activation_quantizers.cat"].compared == 2 * 32


def exported_once(model: nn.Module, path: Any) -> qt.ExportResult:
    prepared = qt.prepare(model, backend="onnxruntime")
    qt.calibrate(prepared, [torch.randn(8, 4)], progress=False)
    return qt.export_onnx(prepared, torch.randn(8, 4), path / "model.onnx")


def test_a_changed_weight_of_a_function_is_noticed(tmp_path) -> None:
    prepared = qt.prepare(Op(OPS["matmul with a parameter"][0]).eval(), backend="onnxruntime")
    x = torch.randn(IMAGE)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, x, tmp_path / "model.onnx", exporter="torchscript")
    converted.matrix.data[0, 0] *= -1.5
    assert qt.export.verify_onnx(converted, x, result.path).weight_codes.differing == 1


def test_a_changed_shared_scale_is_noticed(tmp_path) -> None:
    prepared = qt.prepare(Dense().eval(), backend="onnxruntime")
    x = torch.randn(2, 2, 4, 4)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, x, tmp_path / "model.onnx", exporter="torchscript")
    converted.get_submodule("activation_quantizers.cat").scale.mul_(1.05)
    assert qt.export.verify_onnx(converted, x, result.path).quantizer_codes.differing > 0
