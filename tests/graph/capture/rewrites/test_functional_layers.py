"""Layers of a class of their own that call their function with their weight are quantized as torch's layers."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.nn import QuantConv2d, QuantWeighted
from tests import nets


class SameConv(nn.Conv2d):
    """Pads its input as TensorFlow does, as timm's Conv2dSame."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = zip(x.size()[-2:], self.weight.shape[-2:], self.stride, strict=True)
        pads = [max((math.ceil(n / step) - 1) * step + k - n, 0) for n, k, step in sizes]
        x = F.pad(x, (pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class Doubled(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(input=x, weight=self.weight, bias=self.bias, stride=2, groups=self.groups)


class Projection(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.weight, self.bias)


class Adapted(nn.Linear):
    """A layer with layers of its own, which stays as it is."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.up(self.down(x))


class Standardized(nn.Conv2d):
    """A convolution whose weight is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, self.stride, self.padding
        )


def stages(first: nn.Module, channels: int, second: nn.Module | None = None) -> nn.Module:
    second = SameConv(channels, 4, 1) if second is None else second
    return nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU(), second, nn.BatchNorm2d(4), SameConv(4, 2, 1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "without a bias": lambda: stages(SameConv(3, 8, 3, stride=2, bias=False), 8),
    "groups": lambda: stages(SameConv(3, 6, 5, stride=2, groups=3), 6),
    "transposed": lambda: stages(SameConv(3, 8, 3), 8, Doubled(8, 4, 2, groups=2)),
}


@pytest.mark.parametrize("training", [True, False], ids=["QAT", "PTQ"])
@pytest.mark.parametrize("net", NETS)
def test_batch_norms_fold_into_them_and_reports_name_them(net: str, training: bool) -> None:
    model, x = nets.trained(NETS[net](), 2, 3, 9, 9).train(training), torch.randn(2, 3, 9, 9)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert all(isinstance(prepared.get_submodule(name), QuantWeighted) for name in ("0", "3", "5"))
    report = qt.quantization_report(prepared)
    assert {"0", "3", "5"} <= {line.name for line in report.layers if line.weight}
    assert not report.left_float
    if training:
        assert set(model.state_dict()) <= set(prepared.state_dict())
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with qt.disable_quantization(ours), torch.no_grad():
            torch.testing.assert_close(ours.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    assert not any("batch_norm" in str(node.target) or str(node.target) in ("1", "4") for node in converted.graph.nodes)


def test_a_layer_that_is_called_twice_stays_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = self.same = SameConv(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.same(self.conv(x).relu())

    model, x = Twice().eval(), torch.randn(2, 3, 8, 8)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert isinstance(prepared.conv, QuantConv2d)
    assert prepared.conv is prepared.same
    nets.assert_float_when_off(prepared, model, x)


def test_linear_layers_too(tmp_path: Path) -> None:
    model, x = nn.Sequential(SameConv(3, 2, 3), nn.ReLU(), Projection(2 * 16, 4)).eval(), torch.randn(2, 3, 4, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, (x,), tmp_path / "model.onnx", progress=False)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0


def test_layers_with_more_than_a_weight_and_a_bias_stay_functions() -> None:
    model, x = nn.Sequential(Adapted(), nn.ReLU()).eval(), torch.randn(2, 8)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    assert {"linear", "0.down", "0.up"} <= {line.name for line in qt.quantization_report(prepared).layers}


def test_a_computed_weight_is_the_reason_of_a_batch_norm_that_stays() -> None:
    model, x = nn.Sequential(Standardized(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 8, 8)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    line = next(line for line in qt.quantization_report(prepared).left_float if line.name == "1")
    assert "'conv2d' is a function whose weight no torch.nn layer holds" in line.verdict.text
