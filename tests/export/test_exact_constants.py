"""Constants close to 0 or 1 are in the file: onnxscript's rules take them for 0 or 1, and remove their ops."""

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt


class Close(nn.Module):
    """Adds and multiplies by constants close to 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("eps", torch.tensor(2e-9))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        norm = x.norm(dim=1, keepdim=True)
        return (
            self.fc(x),
            x / (norm + 1e-9),
            x / (self.eps + norm),
            x * 1.000003,
            (x - 3e-9) / 1.000002,
            x.double() + 1e-11,
            x + 0.0,
        )


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_outputs_are_those_of_pytorch(tmp_path: Path, exporter: str) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    prepared = qt.prepare(Close().eval(), x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    model = qt.convert(prepared)
    path = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter).path
    session = onnxruntime.InferenceSession(path)
    assert [each.name for each in session.get_inputs()] == ["x"]
    quantized, *others = zip(model(x), map(torch.from_numpy, session.run(None, {"x": x.numpy()})), strict=True)
    torch.testing.assert_close(*quantized)
    for ours, of_file in others:
        torch.testing.assert_close(ours, of_file, rtol=1e-7, atol=1e-16)


def test_a_graph_without_such_constants_is_as_torch_optimizes_it(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softplus()).eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    path = qt.export_onnx(qt.convert(prepared), x, tmp_path / "m.onnx").path
    assert not [each.name for each in onnx.load(path).graph.initializer if each.name.endswith(".exact")]
