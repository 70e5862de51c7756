"""Small networks that the tests quantize: each holds one thing that passes get wrong."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt


class ConvNet(nn.Module):
    """All layer kinds: conv, deconv with groups, linear, BN, ReLU, residual add, pools, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.up, self.bn3 = (
            nn.ConvTranspose2d(8, 12, 3, stride=2, padding=1, output_padding=1, groups=2),
            nn.BatchNorm2d(12),
        )
        self.relu = nn.ReLU(inplace=True)
        self.average = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        y = self.bn2(self.conv2(x))
        y += x
        y = self.relu(self.bn3(self.up(self.relu(y))))
        return self.head(torch.flatten(self.average(y), 1))


class LinearNet(nn.Module):
    """Linear layers with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.bn(self.fc1(x))))


class Residual(nn.Module):
    """A residual add: identity shortcut, or a downsampling one."""

    def __init__(self, downsample: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(4)
        self.shortcut = nn.Conv2d(4, 4, 1) if downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(torch.add(self.bn2(self.conv2(torch.relu(self.conv1(x)))), self.shortcut(x)))


class SecondUser(nn.Module):
    """A convolution whose output goes to its batch norm and elsewhere: it must not be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) * torch.sigmoid(y)


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)))


class ControlFlow(nn.Module):
    """A block with control flow on values, which no tracer takes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # the line that the error must name
                return self.fc(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), ControlFlow.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


class TwoBad(nn.Module):
    """Two bad submodules, one of them inside another that is bad as well."""

    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.fc = ControlFlow.Block(), linear_of()

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            while y.abs().max() > 100:
                y = y / 2
            return self.fc(y)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loops, self.stage = linear_of(), TwoBad.Loops(), nn.Sequential(ControlFlow.Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(self.loops(self.first(x)))


def linear_of(count: int = 4) -> nn.Linear:
    return nn.Linear(count, count)


def trained(model: nn.Module, *shape: int, steps: int = 4) -> nn.Module:
    """Return the model with batch norm statistics and affine parameters as a trained one has them."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    model.train()
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(*shape))
    return model


def settled(model: nn.Module) -> nn.Module:
    """Return a model behind the first steps of a training, in which quantizers look at their inputs and ranges follow them."""
    for quantizer in qt.quantizers_of(model).values():
        quantizer.steps = -1
    return model


def assert_float_when_off(prepared: nn.Module, model: nn.Module, x: Tensor) -> None:
    """With its quantizers off, a prepared model gives the float model's output bit for bit."""
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))
