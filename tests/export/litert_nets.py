"""Random nets of the ops that LiteRT's files have."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Block = Callable[[random.Random, int], tuple[nn.Module, int]]


class Function(nn.Module):
    """A function of an image."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """A sum, a product or a concat of a layer's input and output."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "concat":
            return torch.cat([x, y], 1)
        return torch.relu(x + y) if self.kind == "add" else x - y if self.kind == "sub" else x * y


class Gate(nn.Module):
    """A squeeze-and-excitation gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.Tanh, nn.Identity, nn.SiLU)


def conv(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    out, size = rng.choice((8, 12)), rng.choice((1, 3, 5))
    stride, padding = rng.choice((1, 1, 2)), rng.choice((0, size // 2, "zeros"))
    padding = size // 2 if padding == "zeros" or size > 3 else padding
    layer = nn.Conv2d(channels, out, size, stride, padding, bias=rng.random() < 0.8)
    return nn.Sequential(layer, nn.BatchNorm2d(out), rng.choice(ACTIVATIONS)()), out


def depthwise(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    times = rng.choice((1, 2))
    layer = nn.Conv2d(channels, channels * times, 3, 1, 1, dilation=rng.choice((1, 1, 2)), groups=channels)
    return nn.Sequential(layer, rng.choice(ACTIVATIONS)()), channels * times


def grouped(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, 1, 1, groups=2), nn.ReLU()), 8


def transposed(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    size, padding, output_padding = rng.choice(((2, 0, 0), (4, 1, 0), (5, 2, 1), (3, 1, 1)))
    return nn.Sequential(nn.ConvTranspose2d(channels, 8, size, 2, padding, output_padding), nn.ReLU()), 8


def pool(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    pools = (
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 1, 1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, 1, 1, False, False),
    )
    return rng.choice(pools), channels


def resize(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    mode = rng.choice(("nearest", "bilinear"))
    return Function(lambda x: F.interpolate(x, scale_factor=2, mode=mode)), channels


def moved(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    functions = (
        lambda x: F.pad(x, (1, 0, 2, 1)),
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, 1:],
        lambda x: x[:, :, :, ::2],
    )
    return Function(rng.choice(functions)), channels


def shuffled(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.Conv2d(channels, 16, 1), nn.PixelShuffle(2)), 4


def residual(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    kind = rng.choice(("add", "sub", "mul", "concat"))
    layer = nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1), rng.choice(ACTIVATIONS)())
    return Residual(layer, kind), channels * (2 if kind == "concat" else 1)


def gate(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    return Gate(channels), channels


BLOCKS: tuple[Block, ...] = (
    conv,
    conv,
    depthwise,
    grouped,
    transposed,
    pool,
    resize,
    moved,
    shuffled,
    residual,
    residual,
    gate,
)


class Head(nn.Module):
    """What makes scores of an image."""

    def __init__(self, rng: random.Random, channels: int) -> None:
        super().__init__()
        self.flat, self.soft = rng.random() < 0.5, rng.random() < 0.5
        self.layer = nn.Linear(channels * (4 if self.flat else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(F.adaptive_avg_pool2d(x, 2), 1) if self.flat else x.mean((2, 3))
        x = self.layer(x)
        return torch.softmax(x, 1) if self.soft else x


def random_net(seed: int) -> nn.Module:
    """Return a net for images of three channels and 16 x 16 pixels, with statistics of its batch norms."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    first, channels = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU()), 8
    blocks: list[nn.Module] = [first]
    for _ in range(4):
        block, channels = rng.choice(BLOCKS)(rng, channels)
        blocks.append(block)
    to_16 = nn.Sequential(nn.Upsample((16, 16)), Head(rng, channels))
    net = nn.Sequential(*blocks, to_16)
    net.train()(torch.randn(8, 3, 16, 16))
    return net.eval()
