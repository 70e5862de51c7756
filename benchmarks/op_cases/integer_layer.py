"""A layer with its batch norm and ReLU on codes, beside the same layer in float."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.measure import Case, bytes_kept
from qtoolkit.nn.on_codes import least_positions
from qtoolkit.nn.weighted import QuantWeighted

FORWARDS = ("float", "integer")


@dataclass(frozen=True)
class Layer:
    """A convolution with as many output pixels as input pixels."""

    channels: int
    outputs: int
    kernel: int
    groups: int = 1

    def __str__(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.channels} to {self.outputs}, {self.kernel}x{self.kernel}{groups}"

    def module(self) -> nn.Conv2d:
        """Return the convolution."""
        padding = self.kernel // 2
        return nn.Conv2d(self.channels, self.outputs, self.kernel, padding=padding, groups=self.groups, bias=False)


def model_of(layer: Layer, images: int, size: int, device: str = "cpu") -> tuple[nn.Sequential, Tensor]:
    """Return a float model with this layer between two pointwise convolutions, and its input."""
    torch.manual_seed(0)
    ends = nn.Conv2d(layer.channels, layer.channels, 1), nn.Conv2d(layer.outputs, 8, 1)
    model = nn.Sequential(ends[0], nn.ReLU(), layer.module(), nn.BatchNorm2d(layer.outputs), nn.ReLU(), ends[1])
    x = torch.randn(images, layer.channels, size, size)
    if device != "cpu":
        x, model = x.to(device, memory_format=torch.channels_last), model.to(device, memory_format=torch.channels_last)
    return model, x


def prepared_of(layer: Layer, images: int, size: int, forward: str, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """Return the model prepared and in training mode, and its input."""
    model, x = model_of(layer, images, size, device)
    prepared = qt.prepare(model, (x,), training_arithmetic=forward, backend="tensorrt10")
    qt.calibrate(prepared.eval(), [x], progress=False)
    return prepared.train(), x


def step_of(layer: Layer, images: int, size: int, forward: str, device: str = "cpu") -> tuple[Callable[[], None], int]:
    """Return a step of a model with this layer, and from how many positions on "auto" computes it on codes."""
    prepared, x = prepared_of(layer, images, size, forward, device)
    measured = prepared.get_submodule("2")
    if not isinstance(measured, QuantWeighted):
        raise TypeError(f"the layer is a {type(measured).__name__}, not a quantized one.")
    return partial(step, prepared, x), least_positions(measured)


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model(x).sum().backward()


def integer_layer_case(device: str, layer: Layer, images: int, size: int) -> Case:
    """Return a layer as torch computes it in float, and quantized by each arithmetic."""
    models = {"torch": model_of(layer, images, size, device)}
    models |= {f"ours, {forward}": prepared_of(layer, images, size, forward, device) for forward in FORWARDS}
    work = {name: partial(step, *of) for name, of in models.items()}
    kept = {name: partial(bytes_kept, *of) for name, of in models.items()}
    return Case("a layer, forward + backward", f"{layer}, {images} images of {size}x{size}", work, kept=kept)
