"""Models with Python that the tracer has to follow, each with its inputs."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import nets
from tests.nets import linear_of


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.fc(x) * scale
        if shift is not None:
            y = y + shift
        return self.fc(y) if twice else y


class Nested(nn.Module):
    """Outputs in a dict of tuples and lists, from an OrderedDict that the forward fills, as torchvision's segmenters do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = linear_of(), linear_of()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, object]:
        x = inputs["image"]
        result = OrderedDict()
        result["out"] = self.fc(x)
        result["more"] = ([self.aux(x), x], {"deep": x + 1})
        return result


@dataclass
class Boxes:
    boxes: Tensor
    scores: Tensor


class MakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor) -> Boxes:
        return Boxes(self.fc(x), scores=x.sum(1))


class Functionals(nn.Module):
    """A float functional of the user's: its methods compute, and its forward raises."""

    class Ops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("call its methods")

        def add(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.add(x, y)

        def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(torch.add(x, y))

        def mul(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.mul(x, y)

        def cat(self, x: list[Tensor], dim: int = 0) -> Tensor:
            return torch.cat(x, dim)

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ops = linear_of(), Functionals.Ops()

    def forward(self, x: Tensor) -> Tensor:
        y = self.ops.add_relu(self.fc(x), x)
        return self.ops.cat([self.ops.mul(x, y), self.ops.add(x, y)], dim=1)


class OnSizes(nn.Module):
    """Python that uses sizes: branches, padding to a multiple, loops over a dimension, int, float, len, range, isinstance."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of(8)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.dim() == 2, "two dimensions")
        assert x.shape[0] > 0
        if not isinstance(x, Tensor):
            raise TypeError(type(x))
        if x.shape[-1] % 8 != 0:
            x = F.pad(x, (0, max(math.ceil(x.shape[-1] / 8) * 8 - x.shape[-1], 0)))
        y = self.fc(x)
        for i in range(x.size(1) // 4):
            y = y + y[:, i : i + 1] / float(len(x.shape))
        first, second = x.chunk(2, dim=1)
        steps = torch.arange(int(first.shape[1]), device=x.device, dtype=x.dtype)
        return y + F.pad(second * steps, (0, 4)) if torch.jit.is_scripting() is False else y


class Untouched(nn.Module):
    """Parts that eval mode does not use: an auxiliary head, a buffer, a parameter, a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(OrderedDict(fc=linear_of(), unused=nn.BatchNorm1d(4)))
        self.aux = nn.Sequential(linear_of(), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("index", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stage.fc(x) + self.table[self.index] + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.aux(y) if self.training else y


def deeplab() -> nn.Module:
    models = pytest.importorskip("torchvision.models.segmentation")
    return models.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, aux_loss=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], object]]] = {
    "convolutions": (nets.ConvNet, lambda: (torch.randn(4, 3, 8, 8),)),
    "shared": (nets.Shared, lambda: (torch.randn(2, 4),)),
    "keywords": (Keywords, lambda: {"x": torch.randn(2, 4), "scale": torch.randn(4)}),
    "dict": (Nested, lambda: ({"image": torch.randn(2, 4)},)),
    "dataclass": (MakesDataclass, lambda: (torch.randn(2, 4),)),
    "functionals": (Functionals, lambda: (torch.randn(2, 4),)),
    "sizes": (OnSizes, lambda: (torch.randn(2, 6),)),
    "untouched": (Untouched, lambda: (torch.randn(2, 4),)),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 5, 8)),
    ),
    "deeplab": (deeplab, lambda: (torch.randn(2, 3, 32, 32),)),
}
