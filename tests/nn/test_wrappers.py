"""Modules that are put around a layer of a quantized model."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import qtoolkit as qt

IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
routes = pytest.mark.parametrize("route", ["graph", "modules"])


class Adapter(nn.Module):
    """A convolution beside a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.beside = layer, nn.Conv2d(3, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.beside(x)


def quantized(route: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)).train()
    if route == "graph":
        model = qt.prepare(model, IMAGES, backend="tensorrt")
    else:
        model = qt.quant_modules.replace(qt.fuse_modules(model, [["0", "1"]]), backend="tensorrt").train()
    qt.calibrate(model, [IMAGES], progress=False)
    return model


def used(model: nn.Module) -> None:
    model(IMAGES)
    qt.convert(model.eval())


@routes
def test_an_adapter_between_a_layer_and_its_batch_norm_is_named(route: str) -> None:
    model = quantized(route)
    model.set_submodule("0", Adapter(model.get_submodule("0")))
    with pytest.warns(UserWarning, match=r"the layer '0' is called by an Adapter now, and the batch norm '1' after it"):
        used(model)


@pytest.mark.parametrize(
    "wrapper", [checkpoint_wrapper, lambda layer: nn.Sequential(nn.Dropout2d(0.1), layer), lambda layer: layer]
)
@routes
def test_wrappers_that_return_what_the_layer_does_say_nothing(route: str, wrapper: Callable) -> None:
    model = quantized(route)
    model.set_submodule("0", wrapper(model.get_submodule("0")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used(model)
    model.set_submodule("4", nn.Sequential(nn.LayerNorm(8 * 36), nn.Linear(8 * 36, 2)))
    assert model.train()(IMAGES).shape == (2, 2)
