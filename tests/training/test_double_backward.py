"""Gradients of gradients, as penalties on them take: with training_arithmetic="float" and save="float"."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.nn.on_codes import PLAIN
from tests.cases import leaf


class Block(nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.bn2(self.conv2(F.softplus(self.bn1(self.conv1(x))))) + self.shortcut(x))


class Net(nn.Module):
    """A small residual network. Its activations have second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.blocks, self.head = nn.Sequential(Block(4, 4), Block(4, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.pool(torch.relu(self.norm(self.stem(x)))), 2)
        x = self.blocks(x).flatten(2)
        return self.head((x @ x.transpose(1, 2) @ x).mean(2))


def images() -> Tensor:
    return torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def quantized(route: str, model: nn.Module, quantizer: str = "fixed", **options: str) -> nn.Module:
    config = qt.QConfig(qt.QuantSpec(quantizer=quantizer), qt.QuantSpec(quantizer=quantizer, axis=0))
    mapping = qt.QConfigMapping().set_global(config)
    if route == "graph":
        prepared = qt.prepare(model.train(), (images(),), qconfig_mapping=mapping, backend="tensorrt10", **options)
    else:
        prepared = qt.quant_modules.replace(model.train(), mapping, backend="tensorrt10", **options)
    qt.calibrate(prepared, [images()], progress=False)
    return prepared.train()


def penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the penalty on the gradient of the input, and its gradients in the float model's parameters."""
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    value = gradient.square().sum()
    value.backward()
    names = [name for name, _ in Net().named_parameters()]
    return value.detach(), [model.get_parameter(name).grad for name in names]


@pytest.mark.parametrize("route", ["graph", "modules"])
@pytest.mark.parametrize("how", ["prepare", "set"])
def test_penalties_are_those_of_the_float_model_with_quantizers_off(route: str, how: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    options = {"training_arithmetic": "float", "save": "float"} if how == "prepare" else {}
    prepared = quantized(route, copy.deepcopy(model).float(), **options).double()
    if how == "set":
        qt.nn.set_training_arithmetic(prepared, arithmetic="float", save="float")
    x = leaf(images().double())
    wanted = penalty(model.train(), x)
    with qt.disable_quantization(prepared):
        found = penalty(prepared, leaf(images().double()))
    torch.testing.assert_close(found[0], wanted[0])
    for one, other in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(one, other)
    value, gradients = penalty(prepared, leaf(images().double()))
    assert value.isfinite()
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_gradgradcheck(route: str) -> None:
    torch.manual_seed(0)
    prepared = quantized(route, Net(), training_arithmetic="float", save="float").double()
    with qt.disable_quantization(prepared):
        assert torch.autograd.gradgradcheck(prepared, (leaf(images()[:2, :, :4, :4].double()),), atol=1e-4)


def test_learned_scales_have_an_error_that_says_what_to_do() -> None:
    prepared = quantized("graph", Net(), "lsq", training_arithmetic="float", save="float")
    with pytest.raises(NotImplementedError, match="double backward through a scale"):
        penalty(prepared, leaf(images()))


def test_the_setting_goes_with_copies_and_back() -> None:
    prepared = quantized("graph", Net(), training_arithmetic="float", save="float")
    assert "computed by torch: as asked" in str(qt.quantization_report(prepared))
    copied = copy.deepcopy(prepared)
    assert copied.training_arithmetic == PLAIN
    penalty(copied, leaf(images()))
    qt.nn.set_training_arithmetic(copied)
    assert "fused with" in str(qt.quantization_report(copied))
    with pytest.raises((RuntimeError, NotImplementedError)):
        penalty(copied, leaf(images()))
