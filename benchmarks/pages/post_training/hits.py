"""Which test images a model classifies correctly, and the difference of two models on the same images."""

import base64
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DECIDED = 2.0  # standard errors


@dataclass(frozen=True)
class Difference:
    """The difference of two accuracies on the same images, in points.

    Attributes:
        points: The difference.
        error: Its standard error, from the images that only one of the two models classifies correctly.
    """

    points: float
    error: float

    @property
    def decided(self) -> bool:
        """Whether it is large enough that other test images would give it the same sign."""
        return abs(self.points) >= DECIDED * self.error > 0

    def __str__(self) -> str:
        return f"{self.points:+.2f} ± {self.error:.2f}{'' if self.decided else ' ~'}"


def difference(of: Tensor, to: Tensor) -> Difference:
    """Return the accuracy of a model less that of another, from their hits (bool, an element for each image).

    Raises:
        ValueError: They are of another number of images.
    """
    if of.shape != to.shape:
        raise ValueError(
            f"difference: hits are of {len(of)} and of {len(to)} images; compare models on the same images."
        )
    each = of.double() - to.double()
    return Difference(100 * float(each.mean()), 100 * float(each.std()) / math.sqrt(len(each)))


def accuracy(hits: Tensor) -> float:
    """Return the share of hits in percent."""
    return 100 * float(hits.double().mean())


@torch.no_grad()
def hits_of(forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """Return whether each image is classified correctly."""
    return torch.cat([forward(x).argmax(1) for x in images.split(250)]) == labels


def packed(hits: Tensor) -> str:
    """Return hits as text, about 600 characters for 10,000 images."""
    return base64.b64encode(zlib.compress(np.packbits(hits.numpy()).tobytes(), 9)).decode()


def unpacked(text: str, count: int) -> Tensor:
    """Return the hits of `packed`."""
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), count=count)
    return torch.from_numpy(bits.astype(bool))
