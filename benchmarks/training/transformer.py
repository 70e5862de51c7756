"""A small vision transformer for images of 32 x 32 pixels, and its float weights, which are trained here."""

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.pages.gpu_networks import Block
from benchmarks.training.cifar import Data, Schedule, trained_float

WIDTH, HEADS, BLOCKS, PATCH, SIZE, CLASSES = 128, 4, 4, 4, 32, 10
EPOCHS, RATE = 10, 1e-3  # of the float weights
SEED = 0
FINE_TUNED = {"optimizer": "adam", "rate": 2e-4}


class Transformer(nn.Module):
    """ViT (arXiv 2010.11929) with 4 blocks of 128 channels, patches of 4 x 4 pixels and the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2, WIDTH) / 50)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, 1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        y: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return y


def float_transformer(data: Data, checkpoints: Path) -> nn.Module:
    """Return it, trained from random weights, or from where an earlier training was ended."""
    torch.manual_seed(SEED)
    model = Transformer()
    schedule = Schedule(len(data.train[1]), EPOCHS, rate=RATE, clip=1.0, optimizer="adam")
    return trained_float(model, data, schedule, SEED, checkpoints / "transformer_float_weights.pt")
