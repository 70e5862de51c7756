"""Networks in torch alone, with random weights: a machine with a GPU may have no other package.

Each is built for a number of pixels, with at most so many equal blocks in a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.places = nn.Parameter(torch.randn(1, (size // 16) ** 2, 768) / 50)
        layers = (
            nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(min(12, most))
        )
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(768), nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(x)).mean(1))


class Attention(nn.Module):
    """Self-attention as timm writes it: one linear layer for query, key and value, and torch's fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within each sequence of a batch."""
        count, tokens, width = x.shape
        qkv = self.qkv(x).reshape(count, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(x.transpose(1, 2).reshape(count, tokens, width))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A block of timm's vision transformers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, 1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, 1e-6), _mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FusedVisionTransformer(nn.Module):
    """ViT-B/16 as timm writes it, with a token for the class."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 768, 16, 16), nn.Parameter(torch.zeros(1, 1, 768))
        self.places = nn.Parameter(torch.randn(1, (size // 16) ** 2 + 1, 768) / 50)
        self.blocks = nn.Sequential(*(Block(768, 12) for _ in range(min(12, most))))
        self.norm, self.head = nn.LayerNorm(768, 1e-6), nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.size(0), -1, -1), x), 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class ShiftedBlock(nn.Module):
    """A block of Swin (Liu and others, 2021): attention in windows, shifted in every other block."""

    def __init__(self, width: int, heads: int, size: int, shifted: bool) -> None:
        super().__init__()
        self.side = side = min(7 if size % 7 == 0 else 4, size)
        self.shift = side // 2 if shifted and side < size else 0
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), _mlp(width)
        self.table = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) / 50)
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + side - 1
        self.register_buffer("index", (apart[0] * (2 * side - 1) + apart[1]).flatten())
        line = torch.arange(size)
        part = (line >= size - side).int() + (line >= size - self.shift)  # where the shift joined what is not beside
        of = (
            (3 * part[:, None] + part)
            .view(size // side, side, size // side, side)
            .transpose(1, 2)
            .reshape(-1, side * side)
        )
        apart = (of[:, None] != of[:, :, None]) * -100.0
        self.register_buffer("mask", apart[:, None] if self.shift else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (batch, height, width, channels)."""
        count, size, _, width = x.shape
        side, shift = self.side, self.shift
        y = self.norm1(x)
        if shift:
            y = torch.roll(y, (-shift, -shift), (1, 2))
        y = y.view(count, size // side, side, size // side, side, width).transpose(2, 3).reshape(-1, side**2, width)
        bias = self.table[self.index].view(side**2, side**2, -1).permute(2, 0, 1).unsqueeze(0)
        if shift:
            bias = (bias + self.mask).repeat(count, 1, 1, 1)
        y = self.attention(y, bias).view(count, size // side, size // side, side, side, width)
        y = y.transpose(2, 3).reshape(count, size, size, width)
        if shift:
            y = torch.roll(y, (shift, shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    """Join four neighbours and halve the channels of the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of half the height and width."""
        count, height, across, width = x.shape
        x = x.reshape(count, height // 2, 2, across // 2, 2, width).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduce(self.norm(x))


class Swin(nn.Module):
    """Swin-T, as timm writes it."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        size, width, layers = size // 4, 96, []
        self.patches, self.first = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        for place, count in enumerate((2, 2, 6, 2)):
            if place:
                layers.append(Merge(width))
                size, width = size // 2, 2 * width
            layers += (ShiftedBlock(width, width // 32, size, i % 2 == 1) for i in range(min(count, 2 * most)))
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.layers(x)).mean((1, 2)))


def _silu(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    return nn.Sequential(*_conv(inputs, outputs, kernel, stride), nn.SiLU())


class Partial(nn.Module):
    """A stage of YOLO's: half of the channels pass some blocks, and the output of each is joined to all others."""

    def __init__(self, inputs: int, outputs: int, count: int, adds: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.adds = _silu(inputs, outputs), adds
        self.blocks = nn.ModuleList(nn.Sequential(_silu(half, half, 3), _silu(half, half, 3)) for _ in range(count))
        self.last = _silu((2 + count) * half, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stage's output."""
        kept, part = self.first(x).chunk(2, 1)
        parts = [kept, part]
        for block in self.blocks:
            part = part + block(part) if self.adds else block(part)
            parts.append(part)
        return self.last(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """Max pools of three sizes beside each other (SPPF)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.pool, self.last = _silu(width, width // 2), nn.MaxPool2d(5, 1, 2), _silu(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pools' outputs, joined."""
        x = self.first(x)
        y = self.pool(x)
        z = self.pool(y)
        return self.last(torch.cat((x, y, z, self.pool(z)), 1))


class Detector(nn.Module):
    """A detector of the size of YOLOv8s, or with a width of 16 of YOLOv8n; it returns boxes and 80 classes at three scales."""

    def __init__(self, size: int, most: int, width: int = 32) -> None:
        super().__init__()
        two = min(2, most)
        at2, at4, at8, at16, at32 = (width << place for place in range(5))
        self.to4 = nn.Sequential(_silu(3, at2, 3, 2), _silu(at2, at4, 3, 2), Partial(at4, at4, 1, True))
        self.to8 = nn.Sequential(_silu(at4, at8, 3, 2), Partial(at8, at8, two, True))
        self.to16 = nn.Sequential(_silu(at8, at16, 3, 2), Partial(at16, at16, two, True))
        self.to32 = nn.Sequential(_silu(at16, at32, 3, 2), Partial(at32, at32, 1, True), Pyramid(at32))
        self.up = nn.Upsample(None, 2)
        self.up16, self.up8 = Partial(at32 + at16, at16, 1, False), Partial(at16 + at8, at8, 1, False)
        self.down16, self.at16 = _silu(at8, at8, 3, 2), Partial(at8 + at16, at16, 1, False)
        self.down32, self.at32 = _silu(at16, at16, 3, 2), Partial(at16 + at32, at32, 1, False)
        self.boxes = nn.ModuleList(self._head(width, 64, 64) for width in (at8, at16, at32))
        self.classes = nn.ModuleList(self._head(width, max(at8, 80), 80) for width in (at8, at16, at32))

    @staticmethod
    def _head(inputs: int, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(_silu(inputs, width, 3), _silu(width, width, 3), nn.Conv2d(width, outputs, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs at three scales."""
        at8 = self.to8(self.to4(x))
        at16 = self.to16(at8)
        at32 = self.to32(at16)
        up16 = self.up16(torch.cat((self.up(at32), at16), 1))
        up8 = self.up8(torch.cat((self.up(up16), at8), 1))
        down16 = self.at16(torch.cat((self.down16(up8), up16), 1))
        down32 = self.at32(torch.cat((self.down32(down16), at32), 1))
        heads = zip((up8, down16, down32), self.boxes, self.classes, strict=True)
        return tuple(torch.cat((box(y), of(y)), 1) for y, box, of in heads)


def resnet50(size: int, most: int) -> nn.Module:
    """Return ResNet-50."""
    layers = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(min(count, most)):
            layers.append(Bottleneck(inputs, width, stride if place == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def mobilenet_v2(size: int, most: int) -> nn.Module:
    """Return MobileNetV2."""
    layers, inputs = [*_conv(3, 32, 3, 2), nn.ReLU6()], 32
    blocks = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, outputs, count, stride in blocks:
        for place in range(min(count, most)):
            layers.append(InvertedResidual(inputs, outputs, stride if place == 0 else 1, expansion))
            inputs = outputs
    layers += [*_conv(inputs, 1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Network:
    """What builds a network, the pixels of its images, and the sizes of the batches that are measured."""

    build: Callable[[int, int], nn.Module]
    size: int = 224
    batches: tuple[int, ...] = (64, 256)


FUSED = "ViT-B/16 of timm"
NETWORKS = {
    "ResNet-50": Network(resnet50),
    "MobileNetV2": Network(mobilenet_v2),
    "ViT-B/16": Network(VisionTransformer),
    FUSED: Network(FusedVisionTransformer),
    "Swin-T": Network(Swin),
    "YOLO": Network(Detector, 640, (16, 64)),
}
