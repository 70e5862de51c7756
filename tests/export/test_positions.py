"""Positions of maxima: where a window has several, verification takes those that onnxruntime chose, and no others."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export.verification.codes import ChosenMaxima


class Unpooled(nn.Module):
    """A pool whose positions an unpooling takes, on sums with many equal values that round differently."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, pool, unpool = (getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "MaxPool", "MaxUnpool"))
        self.conv1, self.pool, self.unpool = conv(3, 8, 3, padding=1), pool(2, return_indices=True), unpool(2)
        self.conv2 = conv(8, 4, 3, padding=1)
        with torch.no_grad():
            self.conv1.weight.copy_((self.conv1.weight * 8).round() / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.unpool(*self.pool(torch.relu(self.conv1(x)))))


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("dims", [1, 2])
def test_pools_and_unpools_are_verified(tmp_path, route: str, dims: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, *[32] * dims).sign()
    x[:, :, 8:24] = 0.5
    model = Unpooled(dims).eval()
    model = (
        qt.prepare(model, (x,), backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(model, [x], progress=False)
    codes = qt.export_onnx(model, x, tmp_path / "m.onnx").verification
    assert codes.layer_codes.differing == 0
    assert codes.layer_codes.compared == x.numel() + x.numel() // 3 * 8


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_only_positions_of_maxima_are_taken(dims: int) -> None:
    x = torch.zeros(2, 2, *[2] * dims)
    x[0, 0].flatten()[:2] = torch.tensor([1.0, 1 - 1e-7])  # in the first window either of two
    x[1, 1].flatten()[1] = 1.0  # in the last window one
    plane = 2**dims
    given = torch.tensor([1, plane + 1, 2 * plane, 3 * plane]).reshape(2, 2, *[1] * dims).numpy()
    with ChosenMaxima([given]):
        _, own = getattr(F, f"max_pool{dims}d")(x, 2, return_indices=True)
        _, second = getattr(F, f"max_pool{dims}d")(input=x, kernel_size=2, return_indices=True)
    assert own.flatten().tolist() == [1, 1, 0, 1]
    assert second.flatten().tolist() == [0, 0, 0, 1]


def test_positions_of_another_shape_are_not_taken() -> None:
    x = torch.rand(1, 1, 4, 4)
    with ChosenMaxima([torch.zeros(9, dtype=torch.int64).numpy()]):
        taken = F.max_pool2d(x, 2, return_indices=True)[1]
    assert torch.equal(taken, F.max_pool2d(x, 2, return_indices=True)[1])
