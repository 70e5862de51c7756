"""Models for module replacement, which no tracer takes, and calibrated ones."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt


class Branches(nn.Module):
    """Two ways by the values, a loop, and a layer with the name of the exporter's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.near, self.far = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.model(x)))
        y = self.far(y) if x.mean() > 0 else self.near(y)
        z = y.mean((2, 3))
        for _ in range(2):
            z = z + torch.tanh(self.shared(z))
        return self.head(z)


class Loops(nn.Module):
    """A batch in parts, a layer under two names, and a quantizer called in forward, on a tensor and on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again, self.head = self.first, nn.Linear(6, 3)
        self.ours = qt.TensorQuantizer(qt.QuantSpec(bits=4))
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Tensor]:
        parts = [self.first(part) + self.again(part.flip(0)) for part in x.split(2)]
        y = self.ours(torch.cat(parts)) * self.ours(self.scale)
        return {"logits": self.head(y + bias), "features": y}


def ways(count: int = 4) -> tuple[Tensor, Tensor]:
    """Return inputs of `Branches` that take the far and the near way."""
    x = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    return x, -x


def of_loops() -> tuple[Tensor, Tensor]:
    """Return inputs of `Loops`."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(4)), torch.linspace(-1, 1, 6)


def calibrated(model: nn.Module, batches: list[Any], backend: str = "tensorrt10", **options: Any) -> nn.Module:
    """Return a model replaced and calibrated."""
    replaced = qt.quant_modules.replace(model, backend=backend, **options)
    qt.calibrate(replaced, batches, progress=False)
    return replaced


def in_training(route: str, config: qt.QConfig, model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    """Return a model prepared ("graph") or replaced, calibrated on x, in training mode; for TensorRT if no backend is given."""
    torch.manual_seed(0)
    model, options = (
        model.train(),
        {"backend": "tensorrt10", "qconfig_mapping": qt.QConfigMapping().set_global(config)} | options,
    )
    of_route = qt.prepare(model, (x,), **options) if route == "graph" else qt.quant_modules.replace(model, **options)
    qt.calibrate(of_route.eval(), [x], progress=False)
    return of_route.train()
