"""no_grad in a forward: the graph gives the same values and gradients. Other modes and random numbers are refused."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.nets import linear_of

X = torch.linspace(-2, 2, 8).reshape(2, 4)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = linear_of(), nn.Sequential(linear_of(), nn.BatchNorm1d(4)), linear_of()


class FrozenPart(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        with torch.no_grad():
            y = self.frozen(x)
        return self.last(y + x)


class Decorated(Parts):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)))


class Chunks(Parts):
    """Takes out of the block a tuple, a number and a parameter, and turns gradients off by a function."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            parts, count, weight = self.frozen(self.first(x)).chunk(2, 1), x.shape[0], self.last.weight
        return (torch.cat([parts[0], parts[1]], 1).view(count, -1) @ weight).view(count, -1)


class Nested(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x)
            with torch.no_grad():
                y = torch.relu_(y)
            y = y * 2
            with torch.enable_grad():
                z = self.frozen(y)
            y = z.sum() + y
        return self.last(y + z)


def gradients(model: nn.Module) -> list[Tensor | None]:
    names = ("first.weight", "frozen.0.weight", "frozen.1.weight", "last.weight")
    return [model.get_parameter(name).grad for name in names]


@pytest.mark.parametrize("kind", [FrozenPart, Decorated, Chunks, Nested])
def test_no_grad_keeps_values_and_gradients(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    prepared = qt.prepare(model, (X,), "onnxruntime")
    with qt.disable_quantization(prepared):
        for ours, theirs in ((prepared, copy.deepcopy(model)), (copy.deepcopy(prepared), copy.deepcopy(model))):
            y, expected = ours(X), theirs(X)
            torch.testing.assert_close(y, expected)
            assert y.requires_grad == expected.requires_grad
            if y.requires_grad:
                y.square().sum().backward()
                expected.square().sum().backward()
            for a, b in zip(gradients(ours), gradients(theirs), strict=True):
                assert (a is None) == (b is None)
                assert b is None or torch.allclose(a, b, atol=1e-5)
    assert {line.name for line in qt.quantization_report(prepared).quantized} >= {"first", "frozen.0"}


class ChangesOutside(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y.mul_(2)
        return self.last(y)


class TakesTuple(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            parts = self.first(x).chunk(2, 1)
        return self.last(torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ChangesOutside, "'mul_' changes 'first' in place under torch.no_grad"),
        (TakesTuple, "'chunk' is computed under torch.no_grad and used outside"),
    ],
)
def test_what_detached_tensors_cannot_express_is_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=f"prepare: {words}.* leaf module with untraced"):
        qt.prepare(kind(), (X,), backend="tensorrt")


def test_without_example_inputs_no_grad_is_refused() -> None:
    with pytest.raises(
        qt.UntraceableError, match="no_grad is entered here, .* without example_inputs.* pass example_inputs"
    ):
        qt.prepare(FrozenPart(), backend="tensorrt")


class Inner(nn.Module):
    """A submodule that applies a function to its input and its layer."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.fc = function, linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def in_float32(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module.fc(x.float())


def in_bfloat16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.fc(x)


def inferred(module: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return module.fc(x)


@torch.autocast("cpu", enabled=False)
def decorated(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x.float())


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "autocast on": (in_bfloat16, "autocast is entered here, which a graph does not record"),
    "inference_mode": (inferred, "inference_mode is entered here"),
    "random": (lambda m, x: m.fc(x) if random.random() < 2 else x, "draws random numbers, by torch, random or numpy"),
    "numpy": (lambda m, x: m.fc(x) * float(np.random.rand() < 2), "draws random numbers"),
    "torch": (lambda m, x: m.fc(x) if torch.rand(()) < 2 else x, "draws random numbers"),
}


@pytest.mark.parametrize("example", [None, (X,)], ids=["plain", "sized"])
@pytest.mark.parametrize("name", REFUSED)
def test_modes_and_random_numbers_are_refused_with_a_remedy_that_works(name: str, example: Any) -> None:
    function, words = REFUSED[name]
    model = nn.Sequential(linear_of(), Inner(function))
    states = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(qt.UntraceableError, match=words) as error:
        qt.prepare(model, example, backend="tensorrt")
    prepared = qt.prepare(model, example, untraced=[error.value.untraced or "1"], backend="tensorrt")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    with qt.disable_quantization(prepared), torch.autocast("cpu", torch.bfloat16):
        ours, expected = prepared(X), model(X)
    assert torch.equal(ours, expected)
    assert ours.dtype == expected.dtype == torch.bfloat16


def on_another_device(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return module.fc(x.float())


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("function", [in_float32, decorated, on_another_device])
def test_autocast_that_is_switched_off_is_skipped_with_a_warning(function: Callable[..., Tensor], capture: str) -> None:
    model = nn.Sequential(linear_of(), Inner(function)).eval()
    sentence = r"switches autocast off, at .*test_torch_modes\.py, line .* under autocast these ops run in its dtype"
    with pytest.warns(UserWarning, match=sentence):
        prepared = qt.prepare(model, X, "onnxruntime", capture=capture)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(X), model(X))
    assert {line.name for line in qt.quantization_report(prepared).quantized} == {"0", "1.fc"}
    leaf = qt.prepare(model, X, "onnxruntime", untraced=["1"])
    with qt.disable_quantization(leaf), torch.autocast("cpu", torch.bfloat16):
        assert leaf(X).dtype == model(X).dtype
