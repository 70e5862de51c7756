"""Rewrites for integer kernels: what onnxruntime then computes in integers, and that no code changes."""

from dataclasses import replace

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import lint, verify

X = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
OPSETS = [("dynamo", 18), ("torchscript", 13)]


class Between(nn.Module):
    """An op between convolutions with ReLUs."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.side, self.last, self.end = (nn.Conv2d(8, 8, 1) for _ in range(4))
        self.slope, self.slopes = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.full((8,), 0.1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.relu(self.last(self.function(self, torch.relu(self.first(x)), x))))


def exported(tmp_path, function, backend: str = "onnxruntime", exporter: str = "dynamo", opset: int = 18):
    """Return the file, and what onnxruntime makes of it; the export has verified the codes layer by layer."""
    prepared = qt.prepare(Between(function).eval(), X, backend)
    qt.calibrate(prepared, [X], progress=False)
    converted = qt.convert(prepared)
    path = qt.export_onnx(converted, X, tmp_path / "m.onnx", exporter=exporter, opset=opset).path
    found = verify(converted, X, path).runtimes["onnxruntime"]
    assert found.not_compared == ()
    return onnx.load(path), found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("padding", [1, (0, 2), (3, 1)])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt10"])
def test_circular_padding_is_slices_and_a_concat(tmp_path, backend: str, padding: int, exporter: str) -> None:
    layers = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=padding, padding_mode="circular"), nn.Conv2d(8, 4, 1)
    prepared = qt.prepare(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval(), X, backend)
    qt.calibrate(prepared, [X], progress=False)
    path = qt.export_onnx(qt.convert(prepared), X, tmp_path / "m.onnx", exporter=exporter, dynamic_batch=True).path
    ops = {node.op_type for node in onnx.load(path).graph.node}
    assert "Pad" not in ops
    assert {"Slice", "Concat"} <= ops
    if backend == "onnxruntime":
        found = verify(qt.convert(prepared, arithmetic="integer"), torch.cat([X, X]), path)
        assert [str(verdict) for verdict in found.check().values()] == ["equal"]
        kernels = [layer.kernel for layer in found.runtimes["onnxruntime"].integer_layers]
        assert kernels.count("QLinearConcat") == (2 if isinstance(padding, int) or min(padding) else 1)
    elif backend == "openvino":
        pytest.importorskip("openvino", reason="the file is not executed: install the extra [openvino]")
        assert verify(qt.convert(prepared), X, path, ["openvino"]).runtimes["openvino"].layer_codes.steps <= 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("exporter", "opset"), OPSETS)
@pytest.mark.parametrize("counts_padding", [True, False])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (3, 1), ((3, 2), (1, 0))])
def test_windows_beyond_the_edge_count_what_lies_inside(
    tmp_path, kernel: int, padding: int, counts_padding: bool, exporter: str, opset: int
) -> None:
    def pool(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        return F.avg_pool2d(y, kernel, 2, padding, True, counts_padding)  # ceil_mode: 8 pixels in steps of 2 do not fit

    prepared = qt.prepare(Between(pool).eval(), X, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    path = qt.export_onnx(qt.convert(prepared), X, tmp_path / "m.onnx", exporter=exporter, opset=opset).path
    result = verify(qt.convert(prepared, arithmetic="integer"), X, path)
    assert [str(verdict) for verdict in result.check().values()] == ["equal"]
    assert "QLinearAveragePool" in [layer.kernel for layer in result.runtimes["onnxruntime"].integer_layers]


PADDED_POOLS = {
    "of the pool": lambda y: F.avg_pool2d(y, 3, 2, 1, True),
    "of its own": lambda y: F.avg_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 2, 0, True),
    "moved": lambda y: F.avg_pool2d(F.pad(y, (1, 1, 1, 1)).transpose(2, 3), 3, 2, 0, True),
    "of what was moved": lambda y: F.avg_pool2d(F.pad(y.transpose(2, 3), (1, 1, 1, 1)), 3, 2, 0, True),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt10", "openvino", "qnn"])
@pytest.mark.parametrize("padding", PADDED_POOLS)
def test_windows_beyond_a_padding_count_what_lies_inside_for_all_targets(tmp_path, padding: str, backend: str) -> None:
    """onnxruntime's optimizations made one integer pool of a padding and a pool, which counts what lies beyond."""
    own, pool = qt.backends[backend].qconfig, PADDED_POOLS[padding]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(own.activation, replace(own.weight, bits=7)))
    prepared = qt.prepare(Between(lambda m, y, x: pool(y)).eval(), X, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    path = qt.export_onnx(qt.convert(prepared), X, tmp_path / "m.onnx").path
    codes = verify(qt.convert(prepared), X, path).runtimes["onnxruntime"]
    assert codes.layer_codes.steps <= 1
    assert lint(path, backend) == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("exporter", "opset"), OPSETS)
@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (lambda m, y, x: F.adaptive_avg_pool2d(y, 1), "QLinearGlobalAveragePool"),
        (lambda m, y, x: F.prelu(m.side(y), m.slope), "QLinearLeakyRelu"),
        (lambda m, y, x: torch.cat([y, torch.relu(m.side(x))], 2), "QLinearConcat"),
        (lambda m, y, x: F.interpolate(y, scale_factor=2), "Resize"),
        (lambda m, y, x: F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2), "DepthToSpace"),
        (lambda m, y, x: y * torch.sigmoid(m.side(x)), "QLinearSigmoid"),
    ],
)
def test_the_op_and_the_layers_around_it_run_in_integers(
    tmp_path, function, kernel: str, exporter: str, opset: int
) -> None:
    _, found = exported(tmp_path, function, exporter=exporter, opset=opset)
    assert kernel in [layer.kernel for layer in found.integer_layers]
    assert [layer.name.removeprefix("/") for layer in found.float_layers] in (["end"], ["end/Conv"])
    assert found.codes.share < 0.02  # the float reference rounds in another order


@pytest.mark.parametrize("mean", [lambda y: y.mean((2, 3), keepdim=True), lambda y: y.mean((-1, -2)).view(-1, 8, 1, 1)])
def test_a_mean_over_the_image_is_a_global_pool(tmp_path, mean) -> None:
    proto, found = exported(tmp_path, lambda m, y, x: mean(y))
    assert "QLinearGlobalAveragePool" in [layer.kernel for layer in found.integer_layers]
    assert len({node.name for node in proto.graph.node}) == len(proto.graph.node)
    assert found.codes.share < 0.02


@pytest.mark.parametrize(("exporter", "opset"), OPSETS)
@pytest.mark.parametrize("mean", [lambda y: y.mean((2, 3), keepdim=True), lambda y: F.adaptive_avg_pool2d(y, 1)])
@pytest.mark.parametrize("dead", ["relu", "mean"])
def test_a_mean_of_scales_that_differ_too_much_is_no_global_pool(tmp_path, dead, mean, exporter, opset) -> None:
    """Of a branch that is zero: onnxruntime raises an error in its integer kernel, and has none for ReduceMean."""
    prepared = qt.prepare(Between(lambda m, y, x: mean(y)).eval(), X, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    with torch.no_grad():
        for name, quantizer in qt.quantizers_of(prepared).items():
            if name == f"activation_quantizers.{dead}" or (dead == "mean" and "pool" in name):
                quantizer._scale.fill_(1e-12)
    converted = qt.convert(prepared, arithmetic="integer")
    path = qt.export_onnx(converted, X, tmp_path / "m.onnx", exporter=exporter, opset=opset).path
    assert "ReduceMean" in [node.op_type for node in onnx.load(path).graph.node]
    found = verify(converted, X, path)
    assert found.runtimes["onnxruntime"].codes.differing == 0
    assert "does not take scales that differ so much" in str(qt.quantization_report(converted))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "move",
    [
        lambda y: y[:, :, 1:, :-1],
        lambda y: F.max_pool2d(y, 2),
        lambda y: F.pad(y, (1, 1, 1, 1)),
        lambda y: torch.cat([y, F.max_pool2d(y, 3, 1, 1)], 2),
    ],
    ids=["slice", "max pool", "pad", "cat"],
)
@pytest.mark.parametrize("mean", [lambda y: y.mean((2, 3), keepdim=True), lambda y: F.adaptive_avg_pool2d(y, 1)])
def test_a_mean_of_moved_codes_is_a_global_pool(tmp_path, mean, move) -> None:
    _, found = exported(tmp_path, lambda m, y, x: mean(move(y)))
    assert "QLinearGlobalAveragePool" in [layer.kernel for layer in found.integer_layers]
    assert {"AveragePool", "ReduceMean", "Concat"}.isdisjoint(layer.kernel for layer in found.float_layers)
    assert lint(tmp_path / "m.onnx", "onnxruntime") == ()


def test_a_mean_without_its_dimensions_breaks_no_rule(tmp_path) -> None:
    """onnxruntime moves the QuantizeLinear back past the Squeeze, as past other ops that move values."""
    _, found = exported(tmp_path, lambda m, y, x: m.side(y).relu().mean((2, 3))[:, :, None, None])
    assert "QLinearGlobalAveragePool" in [layer.kernel for layer in found.integer_layers]
    assert lint(tmp_path / "m.onnx", "onnxruntime") == ()


def test_a_mean_of_other_axes_and_a_slope_for_each_channel_stay(tmp_path) -> None:
    proto, _ = exported(tmp_path, lambda m, y, x: F.prelu(m.side(x), m.slopes) + y.mean(1, keepdim=True))
    assert {"PRelu", "ReduceMean"} <= {node.op_type for node in proto.graph.node}


def test_pairs_are_repeated_only_for_targets_that_ask_for_it(tmp_path) -> None:
    cat = lambda m, y, x: torch.cat([y, torch.relu(m.side(x))], 2)  # noqa: E731
    counts = []
    for backend in ("onnxruntime", "openvino"):
        proto, _ = exported(tmp_path, cat, backend)
        concat = next(node for node in proto.graph.node if node.op_type == "Concat")
        counts.append([node.op_type for node in proto.graph.node if concat.output[0] in node.input])
    assert counts == [["QuantizeLinear"], ["Conv"]]


def test_inputs_with_different_scales_have_no_pair_to_repeat(tmp_path) -> None:
    proto, found = exported(tmp_path, lambda m, y, x: F.relu(torch.cat([torch.exp(m.side(x)), y], 2)))
    concat = next(node for node in proto.graph.node if node.op_type == "Concat")
    takers = [node for node in proto.graph.node if concat.output[0] in node.input]
    assert len(takers) == 1
    assert found.codes.steps <= 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize("moved", [False, True])
def test_a_softmax_between_quantized_values_is_computed_in_float(tmp_path, bits: int, moved: bool) -> None:
    """onnxruntime's integer kernel rounds the steps of its output."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = x.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2) if moved else x.softmax(1)
            return self.last(y)

    torch.manual_seed(0)
    x, path = torch.randn(2, 3, 6, 6), tmp_path / "model.onnx"
    activation = qt.QuantSpec(bits=bits, signed=False, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=8, axis=0)))
    prepared = qt.prepare(Gate().eval(), x, "onnxruntime", mapping)
    qt.calibrate(prepared, [x], progress=False)
    qt.export_onnx(prepared, x, path)
    found = qt.export.verify(qt.convert(prepared, arithmetic="integer"), x * 3, path).runtimes["onnxruntime"]
    assert found.verdict is qt.export.Verdict.EQUAL, found
    assert qt.export.lint(path, "onnxruntime") == ()
