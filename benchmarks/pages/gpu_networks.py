"""ResNet-50, MobileNetV2 and ViT-B/16 in torch alone, with random weights: a machine with a GPU may have no other package."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 1000


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He and others, 2015), with the stride in its 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(inputs, width), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU(), *_conv(width, 4 * width)
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return torch.relu(self.body(x) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """A block of MobileNetV2 (Sandler and others, 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        first = [] if expansion == 1 else [*_conv(inputs, inner), nn.ReLU6()]
        self.body = nn.Sequential(*first, *_conv(inner, inner, 3, stride, inner), nn.ReLU6(), *_conv(inner, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.body(x) if self.adds else self.body(x)


class VisionTransformer(nn.Module):
    """ViT-B/16 (Dosovitskiy and others, 2020), by torch's own layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.places = nn.Parameter(torch.randn(1, (size // 16) ** 2, 768) / 50)
        layers = (
            nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(12)
        )
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(768), nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(x)).mean(1))


def resnet50(size: int) -> nn.Module:
    """Return ResNet-50."""
    layers = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            layers.append(Bottleneck(inputs, width, stride if place == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def mobilenet_v2(size: int) -> nn.Module:
    """Return MobileNetV2."""
    layers, inputs = [*_conv(3, 32, 3, 2), nn.ReLU6()], 32
    blocks = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, stride in blocks:
        for place in range(count):
            layers.append(InvertedResidual(inputs, outputs, stride if place == 0 else 1, expansion))
            inputs = outputs
    layers += [*_conv(inputs, 1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-50": resnet50,
    "MobileNetV2": mobilenet_v2,
    "ViT-B/16": VisionTransformer,
}
