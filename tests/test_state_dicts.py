"""The names in state dicts of prepared and replaced models are a promise: checkpoints of earlier versions load."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
RANGE = ("observer.lo", "observer.hi")
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.weight = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.bn(self.conv(x)).mean((2, 3)), self.weight)


def quantizer(name: str, affine: bool) -> list[str]:
    return [f"{name}.{tensor}" for tensor in ("_scale", *(["_zero_point"] if affine else []), *RANGE)]


@pytest.mark.parametrize("kind", ["fixed", "lsq"])
def test_prepared(kind: str) -> None:
    spec = qt.QuantSpec(signed=False, symmetric=False, quantizer=kind)
    config = qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=kind))
    mapping = qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(Net(), X, backend="onnxruntime", qconfig_mapping=mapping)
    assert sorted(prepared.state_dict()) == sorted(
        ["weight", "conv.weight", "conv.bias", *(f"bn.{tensor}" for tensor in BATCH_NORM)]
        + quantizer("conv.weight_quantizer", affine=False)
        + quantizer("weight_quantizers.linear", affine=False)
        + [name for node in ("x", "bn", "mean") for name in quantizer(f"activation_quantizers.{node}", affine=True)]
    )


def test_replaced() -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    assert sorted(replaced.state_dict()) == sorted(
        [
            *("0.weight", "0.bias", *(f"1.{tensor}" for tensor in BATCH_NORM)),
            *quantizer("0.weight_quantizer", affine=False),
            *quantizer("0.input_quantizer", affine=False),
        ]
    )


def test_converted() -> None:
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    grids = [
        "activation_quantizers.input_1.scale",
        "activation_quantizers.input_1.zero_point",
        "0.weight_quantizer.scale",
    ]
    assert sorted(qt.convert(prepared).state_dict()) == sorted(["0.weight", "0.bias", *grids])


def test_histogram() -> None:
    observer = qt.QuantSpec(observer="histogram")
    names = list(qt.TensorQuantizer(observer).state_dict())
    assert names == ["_scale", "observer.counts", "observer.lo", "observer.hi"]
