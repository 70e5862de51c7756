"""Networks and models that the tests of qtoolkit.tuning share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import qtoolkit as qt

W3 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=3, axis=0))
W3A4 = qt.QConfig(activation=qt.QuantSpec(bits=4, signed=False, symmetric=False), weight=W3.weight)

# One layer of each type, in eval mode, with its input.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(12, 6), (32, 12), 0),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (8, 4, 9), 0),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, padding_mode="reflect"), (8, 4, 6, 6), 0),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (4, 2, 4, 4, 4), 0),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (8, 4, 6), 1),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (8, 4, 5, 5), 1),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 4, 2, stride=2), (4, 2, 3, 3, 3), 1),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class Residual(nn.Module):
    """A stem, a stage of two residual blocks, a stretch without branches, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.stage = nn.Sequential(Block(6), Block(6))
        self.neck = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.stage(self.stem(x))).mean((2, 3)))


def correlated(*shape: int) -> Tensor:
    """Return inputs whose elements are correlated, as activations are: rounding errors of weights can then cancel."""
    return torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.5 + 0.3 * torch.randn(shape)


def prepared_on(
    model: nn.Module, batches: list[Tensor], qconfig: qt.QConfig = W3, backend: str = "tensorrt10"
) -> qt.graph.QuantizedGraphModule:
    """Return a model that is prepared, and calibrated on some batches."""
    prepared = qt.prepare(model, batches[0], backend=backend, qconfig_mapping=qt.QConfigMapping().set_global(qconfig))
    qt.calibrate(prepared, batches, progress=False)
    return prepared
