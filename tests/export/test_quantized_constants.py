"""Quantized constants: they stay out of the graph that torch's exporter takes, and the file has their codes all the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

pytest.importorskip("onnxruntime")
CALIBRATION = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    """Return two convolutions, of which the second has groups, a deconvolution with groups and a linear layer."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(150, 3)).eval()


class Tied(nn.Module):
    """A layer whose weight is also multiplied in float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.sin(x) @ self.layer.weight  # type: ignore[no-any-return]  # a Tensor


class Twice(nn.Module):
    """A layer that is called twice, on inputs with scales of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(100 * self.layer(x)))  # type: ignore[no-any-return]  # a Tensor


class TiedBiases(nn.Module):
    """Two layers with one bias, on inputs with scales of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(100 * self.first(x)))  # type: ignore[no-any-return]  # a Tensor


def converted(model: nn.Module, backend: str = "onnxruntime") -> nn.Module:
    prepared = qt.prepare(model.eval(), (CALIBRATION[:1],), backend=backend)
    qt.calibrate(prepared, [CALIBRATION], progress=False)
    return qt.convert(prepared)


def quantizers_in_torch(monkeypatch: pytest.MonkeyPatch, export: Callable[[], object]) -> int:
    """Return how many quantizing ops torch's exporter writes in an export."""
    counts, original = [], torch.onnx.export

    def counting(*args: object, **kwargs: object) -> object:
        program = original(*args, **kwargs)  # type: ignore[arg-type]  # as the caller passes them
        counts.append(sum(node.op_type == "FakeQuant" for node in program.model.graph))  # type: ignore[union-attr]
        return program

    monkeypatch.setattr(torch.onnx, "export", counting)
    export()
    (count,) = counts
    return count


def test_only_activations_are_in_the_graph_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, path = converted(net()), tmp_path / "net.onnx"
    count = quantizers_in_torch(monkeypatch, lambda: qt.export_onnx(model, CALIBRATION, path, progress=False))
    activations = [name for name, _ in model.named_modules() if name.startswith("activation_quantizers.")]
    assert count == len(activations)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt10"])
def test_constants_of_the_file_have_the_names_and_codes_of_the_model(backend: str, tmp_path: Path) -> None:
    model, path = converted(net(), backend), tmp_path / "net.onnx"
    result = qt.export_onnx(model, CALIBRATION, path, integer_weights=True, progress=False)
    assert result.verification is not None
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in onnx.load(path).graph.initializer}
    for name in ("0", "6"):
        layer = model.get_submodule(name)
        codes = layer.weight_quantizer.codes(layer.weight)  # type: ignore[operator, union-attr]  # of a Grid
        offset = 128 if backend == "onnxruntime" else 0
        found = constants[f"{name}.weight.codes"].astype(int) - offset
        assert np.array_equal(found if found.shape == tuple(codes.shape) else found.T, codes.numpy())


def test_a_weight_that_is_also_taken_in_float(tmp_path: Path) -> None:
    model = qt.quant_modules.replace(Tied(), backend="onnxruntime")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    qt.calibrate(model, [x], progress=False)
    result = qt.export_onnx(model, x, tmp_path / "tied.onnx", integer_weights=True, progress=False)
    assert result.verification is not None
    names = {value.name: tuple(value.dims) for value in onnx.load(tmp_path / "tied.onnx").graph.initializer}
    assert names["layer.weight"] == names["layer.weight.codes"] == (8, 8)


@pytest.mark.parametrize("model", [Twice, TiedBiases])
@pytest.mark.parametrize("quantize", [converted, qt.quant_modules.replace])
def test_a_constant_with_two_takers(
    quantize: Callable[..., nn.Module], model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    quantized = quantize(model(), backend="onnxruntime")
    if quantize is not converted:
        qt.calibrate(quantized, [CALIBRATION], progress=False)
    result = qt.export_onnx(quantized, CALIBRATION, tmp_path / "twice.onnx", progress=False)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0
    file = onnx.load(tmp_path / "twice.onnx")
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in file.graph.initializer}
    made_by = {output: node for node in file.graph.node for output in node.output}
    layers = [node for node in file.graph.node if node.op_type == "Conv" and node.input[2] in made_by]
    assert len(layers) == 2 or model is Twice
    for node in layers:
        x, weight, bias = (made_by[name] for name in node.input)
        product = constants[x.input[1]] * constants[weight.input[1]]
        assert np.array_equal(constants[bias.input[1]], product)


def test_the_model_is_unchanged_after_an_export_and_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = converted(net())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    qt.export_onnx(model, CALIBRATION, tmp_path / "net.onnx", progress=False)
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(KeyboardInterrupt):
        qt.export_onnx(model, CALIBRATION, tmp_path / "net.onnx", progress=False)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == {
        n: list(v) for n, v in before.items()
    }
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
