"""Every layer type of qtoolkit.nn: how to build the float layer, and inputs for it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.nn.replacement import replace_layers

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def rand(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.rand(shape) - 0.4,)


def several(count: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.rand(shape) - 0.4 for _ in range(count))


class CatOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cat = qt.nn.Cat()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.cat([x, y])


class TwoSteps(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, self.cell(x))


def indices() -> tuple[Tensor, ...]:
    return (torch.tensor([[0, 3], [5, 3]]),)


CASES: dict[type[nn.Module], Case] = {
    nn.Conv1d: (lambda: nn.Conv1d(2, 4, 3), rand(2, 2, 8)),
    nn.Conv2d: (lambda: nn.Conv2d(2, 4, 3), rand(2, 2, 6, 6)),
    nn.Conv3d: (lambda: nn.Conv3d(2, 4, 2), rand(2, 2, 4, 4, 4)),
    nn.ConvTranspose1d: (lambda: nn.ConvTranspose1d(4, 4, 2, groups=2), rand(2, 4, 6)),
    nn.ConvTranspose2d: (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), rand(2, 4, 4, 4)),
    nn.ConvTranspose3d: (lambda: nn.ConvTranspose3d(4, 4, 2, groups=2), rand(2, 4, 3, 3, 3)),
    nn.Linear: (lambda: nn.Linear(6, 4), rand(3, 6)),
    nn.Embedding: (lambda: nn.Embedding(6, 4), indices),
    nn.EmbeddingBag: (lambda: nn.EmbeddingBag(6, 4), indices),
    nn.MultiheadAttention: (lambda: nn.MultiheadAttention(8, 2, batch_first=True), several(3, 2, 5, 8)),
    nn.LSTM: (lambda: nn.LSTM(4, 4, 2, bidirectional=True), rand(3, 2, 4)),
    nn.GRU: (lambda: nn.GRU(4, 4, batch_first=True), rand(3, 2, 4)),
    nn.LSTMCell: (lambda: TwoSteps(nn.LSTMCell(4, 4)), rand(3, 4)),
    nn.GRUCell: (lambda: TwoSteps(nn.GRUCell(4, 4)), rand(3, 4)),
    nn.MaxPool1d: (lambda: nn.MaxPool1d(2), rand(2, 3, 6)),
    nn.MaxPool2d: (lambda: nn.MaxPool2d(2), rand(2, 3, 6, 6)),
    nn.MaxPool3d: (lambda: nn.MaxPool3d(2), rand(2, 3, 4, 4, 4)),
    nn.AvgPool1d: (lambda: nn.AvgPool1d(2), rand(2, 3, 6)),
    nn.AvgPool2d: (lambda: nn.AvgPool2d(2), rand(2, 3, 6, 6)),
    nn.AvgPool3d: (lambda: nn.AvgPool3d(2), rand(2, 3, 4, 4, 4)),
    nn.AdaptiveAvgPool1d: (lambda: nn.AdaptiveAvgPool1d(2), rand(2, 3, 6)),
    nn.AdaptiveAvgPool2d: (lambda: nn.AdaptiveAvgPool2d(2), rand(2, 3, 6, 6)),
    nn.AdaptiveAvgPool3d: (lambda: nn.AdaptiveAvgPool3d(2), rand(2, 3, 4, 4, 4)),
    nn.InstanceNorm1d: (lambda: nn.InstanceNorm1d(3, affine=True), rand(2, 3, 6)),
    nn.InstanceNorm2d: (lambda: nn.InstanceNorm2d(3, affine=True), rand(2, 3, 6, 6)),
    nn.InstanceNorm3d: (lambda: nn.InstanceNorm3d(3, affine=True), rand(2, 3, 4, 4, 4)),
    qt.nn.Add: (qt.nn.Add, several(2, 3, 4)),
    qt.nn.Mul: (qt.nn.Mul, several(2, 3, 4)),
    qt.nn.MatMul: (qt.nn.MatMul, several(2, 4, 4)),
    qt.nn.Cat: (CatOfTwo, several(2, 3, 4)),
    qt.nn.ScaledDotProductAttention: (qt.nn.ScaledDotProductAttention, several(3, 2, 2, 4, 4)),
}


def quantized_layer(kind: type[nn.Module], quantizer: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """Return a float layer, a calibrated copy that quantizes its inputs and weights, and inputs, in training mode."""
    make, inputs = CASES[kind]
    layer, x = make().train(), inputs()
    model = nn.Sequential(Unpacked(copy.deepcopy(layer)))
    config = qt.QConfig(qt.QuantSpec(quantizer=quantizer), qt.QuantSpec(axis=0, quantizer=quantizer))
    replace_layers(model, [""], lambda *_: config, qt.nn.REPLACED_MODULES)
    qt.calibrate(model, [(x,)], progress=False)
    return layer, model.train(), x


class Unpacked(nn.Module):
    """Calls a layer with a tuple of arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.layer(*inputs)


def first_of(output: Any) -> Tensor:
    """Return the first tensor of an output."""
    return output if isinstance(output, Tensor) else first_of(output[0])
