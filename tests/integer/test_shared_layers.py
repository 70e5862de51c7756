"""Layers that a model calls several times, on the grids of several quantizers: each call has its own bias and kernel."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.nn import QuantConv2d

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Call = Callable[[Tensor], Tensor]


class Calls(nn.Module):
    """Calls of one layer, or of a layer for each call with the same values, between convolutions."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor, Call, Call], Tensor], shared: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Conv2d(3, 16, 3, padding=1), function
        self.a = layer
        self.b = layer if shared else copy.deepcopy(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), self.a, self.b)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def conv() -> nn.Module:
    return seeded(lambda: nn.Conv2d(16, 16, 3, padding=1))


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Call, Call], Tensor]]] = {
    "scaled": (conv, lambda y, a, b: torch.cat([a(y), b(y * 0.5)], 1).tanh()),
    "one input": (conv, lambda y, a, b: torch.cat([a(y), b(y)], 1).tanh()),
    "in turn": (conv, lambda y, a, b: torch.relu(b(torch.relu(a(y)))).tanh()),
    "linear": (
        lambda: seeded(lambda: nn.Linear(16, 16)),
        lambda y, a, b: b(torch.relu(a(y.flatten(2).transpose(1, 2)))).tanh(),
    ),
    "transposed": (
        lambda: seeded(lambda: nn.ConvTranspose2d(16, 16, 2, 2)),
        lambda y, a, b: b(torch.relu(a(y))).tanh(),
    ),
    "grouped": (
        lambda: seeded(lambda: nn.ConvTranspose2d(16, 16, 3, 2, groups=4)),
        lambda y, a, b: b(a(y[:, :, ::4, ::4])).tanh(),
    ),
}


def prepared(model: nn.Module) -> nn.Module:
    model = qt.prepare(model.eval(), X[:1], "onnxruntime")
    qt.calibrate(model, [X], progress=False)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", SHARED)
def test_no_code_differs(tmp_path, name: str, exporter: str) -> None:
    layer, function = SHARED[name]
    integer = qt.convert(prepared(Calls(layer(), function)), arithmetic="integer")
    assert integer.plan.computed["a"].kernel == integer.plan.computed["a_1"].kernel in ("QLinearConv", "QGemm")
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx", exporter=exporter).path
    found = verify(integer, X, path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0, found
    assert {"Conv", "ConvTranspose", "FusedConv", "Gemm", "MatMul"}.isdisjoint(
        each.kernel for each in found.float_layers
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_it_computes_as_a_layer_for_each_call(name: str, training: bool) -> None:
    layer, function = SHARED[name]
    one, several = (prepared(Calls(layer(), function, shared)).train(training) for shared in (True, False))
    outputs = [model(X) for model in (one, several)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.square().sum().backward()
    for parameter in ("weight", "bias"):
        grad, first, second = (getattr(each, parameter).grad for each in (one.a, several.a, several.b))
        torch.testing.assert_close(grad, first + second)


@pytest.mark.slow
def test_the_calls_keep_their_biases_in_copies_and_checkpoints() -> None:
    layer, function = SHARED["scaled"]
    model = prepared(Calls(layer(), function))
    wanted = model(X)
    assert torch.equal(copy.deepcopy(model)(X), wanted)
    assert torch.equal(
        pickle.loads(pickle.dumps(qt.convert(model, arithmetic="integer")))(X), qt.convert(model, "integer")(X)
    )
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), wanted)
    restored = qt.convert(prepared(Calls(conv(), function)), state_dict=qt.convert(model).state_dict())
    assert torch.equal(restored(X), wanted)
    assert torch.equal(model.a(X[:, :1].expand(-1, 16, -1, -1)), model.a(X[:, :1].expand(-1, 16, -1, -1), call=0))


def test_the_biases_of_all_calls_fit_in_int32() -> None:
    layer = conv()
    layer.weight.data[0] *= 1e-12
    layer.bias.data[0] = 100.0
    function = lambda y, a, b: torch.cat([a(y), b(y * 1e-3)], 1).tanh()  # noqa: E731
    model = prepared(Calls(layer, function))
    with pytest.warns(UserWarning, match="biases of 'a'"):
        converted = qt.convert(model)
    steps = [call.sum_steps(converted.a) for call in converted.a.layer_calls]
    assert steps[1][0] < steps[0][0]
    assert 100.0 / steps[1][0] <= 2**30


def test_a_layer_with_a_forward_of_its_own_is_not_numbered() -> None:
    class Own(QuantConv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    layer, function = SHARED["scaled"]
    model = qt.prepare(Calls(layer(), function).eval(), X[:1], "onnxruntime", qat_modules={nn.Conv2d: Own})
    qt.calibrate(model, [X], progress=False)
    integer = qt.convert(model, arithmetic="integer")
    assert "called more than once" in str(integer.plan.computed["a_1"])
    assert torch.equal(integer.a.bias_in_sums(integer.a.bias), integer.a.bias)
