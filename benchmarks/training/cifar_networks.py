"""The networks of benchmarks/accuracy.py: what they take, and where their float weights come from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from export_models import resnet20_of
from torch import Tensor, nn
from torch.nn import functional as F

from training.cifar import Data, Schedule, trained_float

BN_EPS = 1e-3  # Keras' default
EPOCHS, BATCH, RATE = 30, 128, 0.1  # of the float ResNet-8
SEED = 0


@dataclass(frozen=True)
class Network:
    """A network with 10 classes of images (n, 3, 32, 32).

    Attributes:
        title: Its name in tables.
        raw: Whether it takes pixels of 0 to 255; else they are normalised.
        float_model: Takes the folder of data, the images and the folder of checkpoints; returns the model with its float
            weights, in eval mode.
        with_peers: Whether other tools are trained on it where nobody says what to train.
    """

    title: str
    raw: bool
    float_model: Callable[[Path, Data, Path], nn.Module]
    with_peers: bool


class Stack(nn.Module):
    """Two convolutions and a shortcut, which has a convolution without batch norm where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.halves = stride == 2
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=0 if self.halves else 1)
        self.bn1 = nn.BatchNorm2d(width, BN_EPS)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width, BN_EPS)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride) if self.halves else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations (n, width, height / stride, width / stride)."""
        # TensorFlow's "same" padding: for an even size, stride 2 and kernel 3 it is one pixel at the end.
        padded = F.pad(x, (0, 1, 0, 1)) if self.halves else x
        y = F.relu(self.bn1(self.conv1(padded)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet8(nn.Module):
    """The image classification network of MLPerf Tiny (Banbury et al., arXiv 2106.07597), which takes pixels of 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16, BN_EPS)
        self.stacks = nn.Sequential(Stack(16, 16, 1), Stack(16, 32, 2), Stack(32, 64, 2))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.stacks(F.relu(self.bn(self.conv(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _stored_resnet20(folder: Path, data: Data, checkpoints: Path) -> nn.Module:
    return resnet20_of(folder)


def trained_resnet8(folder: Path, data: Data, checkpoints: Path) -> nn.Module:
    """Return ResNet-8, trained from random weights, or from where an earlier training was ended."""
    torch.manual_seed(SEED)
    model = ResNet8()
    schedule = Schedule(len(data.train[1]), EPOCHS, BATCH, RATE)
    return trained_float(model, data, schedule, SEED, checkpoints / "resnet8_float_weights.pt")


NETWORKS = {
    "resnet20": Network("ResNet-20", False, _stored_resnet20, with_peers=True),
    "resnet8": Network("ResNet-8 on raw pixels", True, trained_resnet8, with_peers=False),
}
