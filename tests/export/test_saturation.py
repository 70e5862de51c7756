"""Clips in front of quantizers: onnxruntime loads the file at its default optimizations, and no code changes."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.sessions import saturates_here

X = torch.linspace(-1, 1, 2 * 3 * 9 * 9).reshape(2, 3, 9, 9)


class Clamp(nn.Module):
    def __init__(self, lowest: float | None, highest: float | None) -> None:
        super().__init__()
        self.lowest, self.highest = lowest, highest

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.lowest, self.highest)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-1.0, 1.0),
    "hardtanh above zero": nn.Hardtanh(0.005, 4.0),
    "clamp": Clamp(-2.0, 3.0),
    "lower bound": Clamp(0.0, None),
    "upper bound": Clamp(None, 2.5),
}


def net(activation: nn.Module, end: float | str, backend: str) -> nn.Module:
    """A convolution, an activation and a convolution; the range of the activation ends there, or an observer chooses it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 3)).eval()
    nn.init.normal_(model[0].weight, std=2.0)
    observer = end if isinstance(end, str) else "minmax"
    spec = qt.backends[backend].qconfig
    activations = qt.QuantSpec.from_dict({**spec.activation.to_dict(), "observer": observer})
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activations, spec.weight))
    prepared = qt.prepare(model, X, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    holder = prepared.get_submodule("activation_quantizers")
    (quantizer,) = (module for name, module in holder.named_children() if name != "input_1")
    if isinstance(end, float):
        quantizer.set_range(torch.tensor(-end if quantizer.spec.signed else 0.0), torch.tensor(end))
    return qt.convert(prepared)


def run(path: str, level: onnxruntime.GraphOptimizationLevel) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]


@pytest.mark.parametrize("end", ["histogram", 5.99, 6.005, 6.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("backend", "exporter"),
    [
        pytest.param("onnxruntime", "dynamo", marks=pytest.mark.sweep(1)),
        ("onnxruntime", "torchscript"),
        pytest.param("tensorrt10", "dynamo", marks=pytest.mark.sweep),
        pytest.param("openvino", "torchscript", marks=pytest.mark.sweep),
    ],
)
def test_the_file_loads_at_default_optimizations(
    tmp_path, backend: str, exporter: str, activation: str, end: float | str
) -> None:
    path = str(tmp_path / "model.onnx")
    model = net(ACTIVATIONS[activation], end, backend)
    result = qt.export_onnx(model, X, path, exporter=exporter)  # verified: no code differs without optimizations
    assert result.verification.quantizer_codes.differing == 0
    fused = run(path, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
    step = float(model.get_submodule("2").weight_quantizer.scale.max())
    difference = np.abs(fused - run(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)).max()
    assert difference < 100 * step or saturates_here(path)


@pytest.mark.parametrize(("end", "kept"), [(5.0, False), (6.0, False), (6.01, False), (6.5, True)])
def test_a_clip_that_changes_codes_stays(tmp_path, end: float, kept: bool) -> None:
    path = tmp_path / "model.onnx"
    qt.export_onnx(net(nn.ReLU6(), end, "onnxruntime"), X, path)
    assert ("Clip" in [node.op_type for node in onnx.load(path).graph.node]) == kept


class TwoUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.relu6(self.first(x))
        return self.second(y), y


def test_a_clip_with_a_second_user_stays(tmp_path) -> None:
    prepared = qt.prepare(TwoUsers().eval(), X, backend="openvino")
    qt.calibrate(prepared, [X], progress=False)
    qt.export_onnx(prepared, X, tmp_path / "model.onnx")
    assert "Clip" in [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("moved", [nn.Identity(), nn.MaxPool2d(2), nn.Flatten(2)])
def test_a_clip_of_quantized_values_stays(tmp_path, moved: nn.Module, joined: bool) -> None:
    """onnxruntime would make one pair of the two around it."""
    torch.manual_seed(0)
    first, path = nn.Conv2d(3, 4, 3), tmp_path / "model.onnx"
    nn.init.normal_(first.weight, std=2.0)
    last = nn.Conv1d(4, 4, 1) if isinstance(moved, nn.Flatten) else nn.Conv2d(4, 4, 1)
    layers = [first, *[nn.ReLU()] * joined, moved, nn.Hardtanh(0.0, 0.5), last]
    prepared = qt.prepare(nn.Sequential(*layers).eval(), X, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    qt.export_onnx(prepared, X, path)
    found = qt.export.verify(qt.convert(prepared, arithmetic="integer"), X, path).runtimes["onnxruntime"]
    assert found.verdict is qt.export.Verdict.EQUAL, found
    assert not found.not_compared
    assert not qt.export.lint(path, "onnxruntime")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.4)])
def test_layers_between_activations_of_four_bits_run_in_integers(tmp_path, activation: nn.Module, opset: int) -> None:
    """The file clips their codes; from opset 21 on it could have codes of four bits, which no kernel takes."""
    torch.manual_seed(0)
    path, model = tmp_path / "model.onnx", nn.Sequential(nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 3)).eval()
    nn.init.normal_(model[0].weight, std=2.0)
    spec = qt.QuantSpec(bits=4, signed=False, symmetric=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(axis=0)))
    prepared = qt.prepare(model, X, "onnxruntime", mapping)
    qt.calibrate(prepared, [X], progress=False)
    qt.export_onnx(prepared, X, path, opset=opset)
    found = qt.export.verify(qt.convert(prepared, arithmetic="integer"), X * 2, path).runtimes["onnxruntime"]
    assert found.verdict is qt.export.Verdict.EQUAL, found
    assert found.output_error < 1e-6  # the model's values lie on the grid too
    assert [layer.kernel for layer in found.integer_layers].count("QLinearConv") == 1
    assert not qt.export.lint(path, "onnxruntime")
