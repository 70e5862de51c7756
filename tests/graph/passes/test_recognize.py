"""Activations that are written out are recognized, and behave as torch's functions do: placement, units, files."""

import math
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.op_kinds.table import KINDS

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SLOPE = math.sqrt(2 / math.pi)


class HardSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + 3) / 6


class HardSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = HardSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(x)


class Softplus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x).tanh()


WRITTEN: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "hardswish": [
        lambda x: x * F.relu6(x + 3) / 6, lambda x: x * F.relu6(x + 3.0, inplace=True) / 6.0,
        lambda x: x * (F.relu6(x + 3) / 6), lambda x: x / 6 * F.relu6(3 + x), lambda x: F.relu6(x + 3).mul(x).div(6),
        lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6.0, lambda x: x * torch.clamp(x + 3, 0, 6) * (1 / 6),
        lambda x: x * (x + 3).clamp_(min=0, max=6).div_(6.0), lambda x: torch.clip(x / 6 + 0.5, 0, 1) * x,
        lambda x: x.mul(F.hardsigmoid(x)), HardSwish(),
    ],
    "hardsigmoid": [
        lambda x: F.relu6(x + 3) / 6, lambda x: F.hardtanh(x + 3, 0, 6) / 6.0, lambda x: (x / 6 + 0.5).clamp(0, 1),
        lambda x: torch.add(x, 3).clamp(0, 6).mul(1 / 6), HardSigmoid(),
    ],
    "silu": [lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid().mul(x), lambda x: x * (1 / (1 + torch.exp(-x))),
             lambda x: (x + 0).mul_(x.sigmoid()), lambda x: x / (1 + (-x).exp())],
    "mish": [lambda x: x * torch.tanh(F.softplus(x)), lambda x: x.mul(F.softplus(x).tanh()),
             lambda x: x * torch.tanh(torch.log1p(torch.exp(x))), Softplus()],
    "gelu": [
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476)),
        lambda x: x * (torch.erf(x / 1.41421) + 1) / 2,
        lambda x: 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        lambda x: x * 0.5 * (torch.tanh((x + x**3 * 0.044715) * 0.79788456) + 1),
    ],
}  # fmt: skip
SPELLINGS = [pytest.param(kind, op, id=f"{kind}-{i}") for kind, ops in WRITTEN.items() for i, op in enumerate(ops)]


class Net(nn.Module):
    """A function between convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.act = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.bn(self.conv(x))))


def ops_in(prepared: nn.Module) -> list[tuple[str, str]]:
    lines = qt.quantization_report(prepared).layers
    return [
        (line.kind, str(line.status))
        for line in lines
        if line.kind in KINDS and line.name not in ("conv", "bn", "last")
    ]


@pytest.mark.parametrize(("kind", "function"), SPELLINGS)
def test_it_is_one_op_of_its_kind(kind: str, function: Callable[[Tensor], Tensor]) -> None:
    net = Net(function).eval()
    prepared = qt.prepare(net, X, backend="tensorrt")
    named = qt.prepare(Net({"gelu": F.gelu}.get(kind) or KINDS[kind].recognized[0]).eval(), X, backend="tensorrt")
    assert ops_in(prepared) == ops_in(named)
    assert [name for name, _ in ops_in(prepared)] == [kind]
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(X), net(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WRITTEN)
def test_it_is_recognized_in_a_program_of_torch_export(kind: str) -> None:
    prepared = qt.prepare(Net(WRITTEN[kind][0]).eval(), X, backend="tensorrt", capture="export")
    assert [name for name, _ in ops_in(prepared)] == [kind]


class Sloped(nn.Module):
    """A SiLU whose slope is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


def taken_twice(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return x * gate + gate


@pytest.mark.parametrize(
    "function",
    [
        Sloped(),
        taken_twice,
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x * F.relu6(x + 3) / 5,
        lambda x: x * F.relu6(x + 2.9) / 6,
        lambda x: x * torch.sigmoid(x.mean()),
        lambda x: x.flip(1) * torch.sigmoid(x),
        lambda x: x * torch.sigmoid(x).detach(),
    ],
)
def test_what_computes_something_else_stays(function: Callable[[Tensor], Tensor]) -> None:
    net = Net(function).eval()
    prepared = qt.prepare(net, X, backend="tensorrt")
    assert not {"silu", "hardswish", "hardsigmoid"} & {kind for kind, _ in ops_in(prepared)}
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(X), net(X), rtol=1e-5, atol=1e-5)


def test_the_outermost_activation_is_recognized_and_the_one_inside_of_it_too() -> None:
    function = nn.Sequential(HardSigmoid(), HardSwish(), HardSigmoid())
    prepared = qt.prepare(Net(function).eval(), X, backend="tensorrt")
    assert [kind for kind, _ in ops_in(prepared)] == ["hardsigmoid", "hardswish", "hardsigmoid"]


@pytest.mark.parametrize(
    "exclude", ["mul", nn.ReLU6, torch.mul, "act.sigmoid"], ids=["name", "type", "function", "part of it"]
)
def test_a_rule_for_one_of_its_ops_keeps_it_apart(exclude: Any) -> None:
    class Written(HardSwish):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mul(x, self.sigmoid(x))

    prepared = qt.prepare(Net(Written()).eval(), X, backend="tensorrt", exclude=exclude)
    assert "hardswish" not in [kind for kind, _ in ops_in(prepared)]


@pytest.mark.parametrize("exclude", [F.hardswish, "act", "conv"], ids=["function", "block", "layer before it"])
@pytest.mark.parametrize("backend", ["tensorrt", "qnn"])
def test_a_rule_for_the_function_or_the_block_holds(exclude: Any, backend: str) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.hardswish(x)

    written, named = (qt.prepare(Net(f).eval(), X, backend=backend, exclude=exclude) for f in (HardSwish(), Named()))
    assert ops_in(written) == ops_in(named)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_training_the_units_and_the_file_are_those_of_the_function(tmp_path, kind: str, backend: str) -> None:
    results = []
    for function in (WRITTEN[kind][0], KINDS[kind].recognized[0]):
        torch.manual_seed(0)
        prepared = qt.prepare(Net(function).train(), X, backend=backend)
        qt.calibrate(prepared, [X], progress=False)
        prepared(X).square().sum().backward()
        path = tmp_path / "m.onnx"
        qt.export_onnx(qt.convert(prepared), X, path, exporter="torchscript")
        found = verify(qt.convert(prepared, arithmetic="integer"), X, path)
        found.check()
        ops = [node.op_type for node in onnx.load(path).graph.node]
        results.append((prepared.conv.weight.grad, ops, [len(each.float_layers) for each in found.runtimes.values()]))
    if kind == "gelu":  # the first pattern of each is GELU by erf
        assert "Erf" in results[0][1] or "Gelu" in results[0][1]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.slow
def test_recognizing_is_linear() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(300):
            x = torch.sigmoid(x + 1) * 2
        return x

    prepared = qt.prepare(Net(many).eval(), backend="tensorrt")
    assert len([node for node in prepared.graph.nodes if "sigmoid" in node.name]) == 300
