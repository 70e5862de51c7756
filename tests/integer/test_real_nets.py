"""Real weights and images: integer arithmetic against onnxruntime at its default optimizations, image by image."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks import export_models
from qtoolkit.export import verify
from qtoolkit.export.verification.codes import sum_of
from tests.data import DATA, needs_data

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [needs_data, pytest.mark.data]


def resnet20() -> nn.Module:
    sys.path.insert(0, str(EXAMPLES))
    from cifar10_resnet20 import ResNet20

    model: nn.Module = ResNet20()
    model.load_state_dict(torch.load(DATA / "resnet20_cifar10_jpeg.pt", weights_only=True))
    return model.eval()


def images(split: str, count: int) -> Tensor:
    """Return the first normalised images of the whole set, (count, 3, 32, 32)."""
    with np.load(DATA / "cifar10_jpeg.npz") as archive:
        header, scan, offset = archive["header"].tobytes(), archive[f"{split}_scan"], archive[f"{split}_offset"]
    files = (io.BytesIO(header + scan[offset[i] : offset[i + 1]].tobytes()) for i in range(count))
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def prepared() -> nn.Module:
    model: nn.Module = qt.prepare(resnet20(), (torch.zeros(1, 3, 32, 32),), backend="onnxruntime")
    qt.calibrate(model, images("train", 256).split(64), progress=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_no_code_of_resnet20_differs(tmp_path, prepared: nn.Module, count: int) -> None:
    model, x = qt.convert(prepared, arithmetic="integer"), images("test", count)
    path = qt.export_onnx(model, (x[:100],), tmp_path / "m.onnx", verify=False).path
    codes = []
    for batch in x.split(100):
        result = verify(model, (batch,), path).runtimes["onnxruntime"]
        assert result.not_compared == ()
        assert result.output_difference == 0  # of the logits, so every class too
        codes.append(result.codes)
    assert sum_of(codes).compared > 270_000 * len(x)
    assert sum_of(codes).differing == 0


@pytest.mark.slow
def test_codes_of_fsrcnn_on_a_real_image(tmp_path) -> None:
    subject = export_models.fsrcnn(DATA, quick=True)
    source = qt.prepare(subject.model, (subject.example,), backend="onnxruntime")
    qt.calibrate(source, subject.calibration, progress=False)
    model = qt.convert(source, arithmetic="integer")
    result = verify(
        model, subject.example, qt.export_onnx(model, (subject.example,), tmp_path / "m.onnx", verify=False).path
    )
    result.check()
    codes = result.runtimes["onnxruntime"]
    assert sum(layer.kernel == "QLinearConv" for layer in codes.integer_layers) == 7
    assert codes.codes.differing == 0
