"""Dynamic sizes on which the model's Python depends: a file has no Python, and says nothing when a size changes its answer."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

IMAGE = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 1), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x))


def of_half_the_height(y: Tensor) -> Tensor:
    return F.avg_pool2d(y, (y.shape[2] // 2, 1))


def doubled_if_high(y: Tensor) -> Tensor:
    return y * 2 if y.shape[2] > 10 else y


def doubled_if_long(y: Tensor) -> Tensor:
    return y * 2 if y.shape[2] >= 0 else y  # as every size is


def prepared(then: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = qt.prepare(Net(then).eval(), IMAGE, "onnxruntime")
    qt.calibrate(model, [IMAGE], progress=False)
    return model


def test_a_number_that_follows_from_a_dynamic_size_is_refused(tmp_path) -> None:
    model, path = prepared(of_half_the_height), tmp_path / "model.onnx"
    words = r"export_onnx: a Python number depends on a dynamic size, at .*of_half_the_height.* would use 6, its"
    with pytest.raises(RuntimeError, match=words):
        qt.export_onnx(model, IMAGE, path, dynamic_shapes=({2: "height"},))
    assert not path.exists()
    qt.export_onnx(model, IMAGE, path, dynamic_shapes=({0: "batch", 3: "width"},))


def test_a_branch_on_a_dynamic_size_is_named(tmp_path) -> None:
    model = prepared(doubled_if_high)
    words = (
        r"export_onnx: Python branches on a dynamic size, at .*doubled_if_high.* only the branch for the example inputs"
    )
    with pytest.warns(UserWarning, match=words) as found:
        qt.export_onnx(model, IMAGE, tmp_path / "model.onnx", dynamic_shapes=({2: "height"},))
    assert [warning.filename for warning in found if "Python branches" in str(warning.message)] == [__file__]


@pytest.mark.parametrize("then", [doubled_if_high, doubled_if_long])
def test_branches_that_no_dynamic_size_decides_are_not(then: Callable[[Tensor], Tensor], tmp_path) -> None:
    dims = {3: "width"} if then is doubled_if_high else {2: "height"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "export_onnx")
        qt.export_onnx(prepared(then), IMAGE, tmp_path / "model.onnx", dynamic_shapes=(dims,))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_file_that_is_wrong_for_other_sizes_is_refused(exporter: str, tmp_path) -> None:
    """Without a graph, Python runs in the export alone: no function records what it asks of a size."""
    net = nn.Sequential(Net(doubled_if_high), nn.Conv2d(4, 2, 1)).eval()
    model = qt.quant_modules.replace(net, backend="onnxruntime")
    qt.calibrate(model, [IMAGE], progress=False)
    path = tmp_path / "model.onnx"
    words = r"^export_onnx: the file matches the model for the example inputs, but .* of sizes \(2, 3, 6, 16\): tor"
    with pytest.raises(RuntimeError, match=words):
        qt.export_onnx(model, IMAGE, path, dynamic_shapes=({2: "height"},), exporter=exporter)
    assert not path.exists()
    result = qt.export_onnx(model, IMAGE, path, dynamic_shapes=({0: "batch", 3: "width"},), exporter=exporter)
    assert result.verification.output_error < 1e-5
