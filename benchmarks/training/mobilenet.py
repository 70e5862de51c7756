"""A MobileNetV2 for images of 32 x 32 pixels, and its float weights, which are trained here."""

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.training.cifar import Data, Schedule, trained_float

# Expansion, output channels, number of blocks, stride of the first block, as in table 2 of the paper.
STAGES = ((1, 16, 1, 2), (3, 24, 2, 1), (3, 32, 3, 2), (3, 64, 3, 1), (3, 96, 1, 2))
STEM, HEAD, CLASSES = 16, 128, 10
EPOCHS, RATE = 20, 0.1  # of the float weights
SEED = 0


class Bottleneck(nn.Sequential):
    """An inverted residual: expanded by a convolution of 1 x 1, a depthwise one of 3 x 3, a linear one of 1 x 1."""

    def __init__(self, width_in: int, width: int, expansion: int, stride: int) -> None:
        hidden = width_in * expansion
        expanded = convolution(width_in, hidden, 1) if expansion > 1 else []
        depthwise = convolution(hidden, hidden, 3, stride, groups=hidden)
        super().__init__(*expanded, *depthwise, *convolution(hidden, width, 1)[:-1])
        self.adds = stride == 1 and width_in == width

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations (n, width, height / stride, width / stride)."""
        y = super().forward(x)
        return x + y if self.adds else y


def convolution(width_in: int, width: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution with its batch norm and its activation."""
    conv = nn.Conv2d(width_in, width, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width), nn.ReLU6()]


class MobileNet(nn.Module):
    """MobileNetV2 (arXiv 1801.04381) with 10 narrow blocks, and strides for images of 32 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, STEM, 3))
        blocks, width_in = [], STEM
        for expansion, width, count, stride in STAGES:
            for place in range(count):
                blocks.append(Bottleneck(width_in, width, expansion, 1 if place else stride))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*convolution(width_in, HEAD, 1))
        self.classifier = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        return self.classifier(self.head(self.blocks(self.stem(x))).mean((2, 3)))


def float_mobilenet(data: Data, checkpoints: Path) -> nn.Module:
    """Return it, trained from random weights, or from where an earlier training was ended."""
    torch.manual_seed(SEED)
    model = MobileNet()
    schedule = Schedule(len(data.train[1]), EPOCHS, rate=RATE)
    return trained_float(model, data, schedule, SEED, checkpoints / "mobilenet_float_weights.pt")
