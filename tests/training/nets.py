"""The small network of the training tests, prepared on both routes."""

import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.copies import made_once

SHAPE = (4, 3, 6, 6)
ROUTES = ("graph", "modules")


class Net(nn.Module):
    """Convolution, batch norm, ReLU, a residual add, dropout, a linear layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn, self.relu, self.add = nn.BatchNorm2d(8), nn.ReLU(), qt.nn.Add()
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.relu(self.add(self.bn(self.conv(x)), x))
        return self.fc(self.dropout(x.mean((2, 3))))


def mapping(quantizer: str = "lsq", observer: str = "minmax") -> qt.QConfigMapping:
    spec = qt.QuantSpec(signed=False, symmetric=False, quantizer=quantizer, observer=observer)
    return qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=quantizer)))


def quantized(
    route: str = "graph", quantizer: str = "lsq", model: nn.Module | None = None, observer: str = "minmax"
) -> nn.Module:
    """Return the network in training mode, prepared or replaced on one of `ROUTES`, without ranges of activations."""
    model = Net() if model is None else model
    if route == "graph":
        return qt.prepare(model.train(), qconfig_mapping=mapping(quantizer, observer), backend="onnxruntime")
    fused = qt.fuse_modules(model.train(), [["conv", "bn"]])
    return qt.quant_modules.replace(fused, mapping(quantizer, observer), backend="onnxruntime").train()


@made_once
def learned(route: str = "graph", quantizer: str = "lsq") -> nn.Module:
    """Return the network, calibrated, by default with learned scales."""
    torch.manual_seed(0)
    model = quantized(route, quantizer)
    qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    return model.train()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss.detach()
