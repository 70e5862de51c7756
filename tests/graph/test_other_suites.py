"""Placement beside the suites of other tools: where this package decides otherwise, the reason is in docs/backends.md.

The models have the constructs of their tests, and what they expect of them is stated as data: for tensorrt what the tests of
rules for int8 of NVIDIA's Model Optimizer demand (`test_qdq_rules_int8`), for openvino which tensors NNCF's reference graphs
quantize, by the op that takes them, and which of them have one scale. From "SiLU before a residual add" on, the models are none
of Model Optimizer's tests: version 0.47 placed the pairs in files of them (`modelopt.onnx.quantization.int8`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

Edges = frozenset[tuple[str, str]]
IMAGE = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers and parameters, and a function that calls them."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def conv(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **options)


def parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes))


def activations(model: nn.Module, x: Tensor, backend: str) -> list[tuple[str, str, str]]:
    """Return the quantized activations: what computes and what takes each, and its quantizer."""
    plan = qt.prepare(model.eval(), x, backend=backend).plan
    of_weights = [edge for edge in plan.edges if "weight_quantizer" in edge.quantizer]
    return [(edge.source, edge.consumer, edge.quantizer) for edge in plan.edges if edge not in of_weights]


# ---- tensorrt, by the rules of Model Optimizer


@dataclass(frozen=True)
class Rules:
    """What a test demands of a model: which layers and other ops take quantized tensors."""

    model: Callable[[], nn.Module]
    layers: tuple[str, ...]  # that take a quantized input
    adds: int = 0  # inputs of sums that are quantized
    others: tuple[str, ...] = ()  # further ops that take one
    differs: str = ""  # the reason in docs/backends.md, where this package decides otherwise
    ours: tuple[str, ...] = ()  # what takes a quantized tensor here, where that is something else
    our_adds: int = 0
    x: Tensor = field(default_factory=lambda: IMAGE)


def residual(m: Any, x: Tensor) -> Tensor:
    y = m.b2(m.c2(F.relu(m.b1(m.c1(x)))))
    return F.relu(y + (m.bd(m.d(x)) if hasattr(m, "d") else x))


def deconvolution(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    return F.relu(m.c2(F.relu(m.c1(y))) + y)


def bottleneck(m: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    y = activation(m.c1(x))
    return m.c4(y + activation(m.c3(activation(m.c2(y)))))


def squeeze_and_excite(m: Any, x: Tensor) -> Tensor:
    y = F.silu(m.c1(x))
    return m.c4(y * torch.sigmoid(m.c3(F.silu(m.c2(F.adaptive_avg_pool2d(y, 1))))))


def attend(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)


def convs(count: int) -> dict[str, nn.Module]:
    return {f"c{i + 1}": conv(16, 16) for i in range(count)}


def between(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A function between two convolutions."""
    return lambda: Net(lambda m, x: m.c2(function(m.c1(x))), **convs(2))


TENSORRT: Mapping[str, Rules] = {
    "bias": Rules(lambda: Net(lambda m, x: F.relu(m.c(x) + m.b), c=conv(16, 16, bias=False), b=parameter(1, 16, 1, 1)), ("c",)),
    "residual": Rules(
        lambda: Net(residual, c1=conv(16, 16), b1=nn.BatchNorm2d(16), c2=conv(16, 16), b2=nn.BatchNorm2d(16)),
        ("c1", "c2"), adds=1,
    ),
    "downsample": Rules(
        lambda: Net(residual, c1=conv(16, 32), b1=nn.BatchNorm2d(32), c2=conv(32, 32), b2=nn.BatchNorm2d(32), d=conv(16, 32),
                    bd=nn.BatchNorm2d(32)),
        ("c1", "c2", "d"), adds=1,
    ),
    "deconvolution": Rules(
        lambda: Net(deconvolution, up=nn.ConvTranspose2d(16, 16, 2, 2), c1=conv(16, 16), c2=conv(16, 16)),
        ("up", "c1", "c2"), adds=1,
    ),
    "sigmoid and product": Rules(
        lambda: Net(lambda m, x: m.c2((lambda y: y * torch.sigmoid(y))(m.b(m.c1(x)))), c1=conv(16, 16), b=nn.BatchNorm2d(16),
                    c2=conv(16, 16)),
        ("c1", "c2"),
    ),
    "activation and pool": Rules(lambda: Net(lambda m, x: F.max_pool2d(F.relu(m.c(x)), 2), c=conv(16, 16)), ("c",)),
    "pool and reshape": Rules(
        lambda: Net(lambda m, x: F.max_pool2d(F.relu(m.c(x)), 2).flatten(1), c=conv(16, 16)), ("c",)
    ),
    "isinf": Rules(lambda: Net(lambda m, x: torch.isinf(m.c(x)), c=conv(16, 16)), ("c",)),
    "layer norm": Rules(
        lambda: Net(lambda m, x: m.norm(m.c(x)), c=conv(16, 16), norm=nn.LayerNorm(8)), ("c",), others=("norm",),
        differs="layer norm", ours=("c",),
    ),
    "few channels": Rules(
        lambda: Net(lambda m, x: m.c2(m.c1(x)) * 2, c1=conv(16, 16, 3), c2=conv(16, 16, 3, groups=8)), ("c1",),
        differs="few channels", ours=("c1", "c2"),
    ),
    "one row": Rules(
        lambda: Net(lambda m, x: m.fc(x), fc=nn.Linear(16, 8)), (), differs="one row", ours=("fc",), x=torch.randn(1, 16)
    ),
    "SiLU before a residual add": Rules(
        lambda: Net(lambda m, x: bottleneck(m, x, F.silu), **convs(4)), ("c1", "c2", "c3", "c4"), adds=2
    ),
    "ReLU before a residual add": Rules(
        lambda: Net(lambda m, x: bottleneck(m, x, F.relu), **convs(4)), ("c1", "c2", "c3", "c4"), adds=1,
        differs="ReLU before a residual add", ours=("c1", "c2", "c3", "c4"), our_adds=2,
    ),
    "sum of two convolutions": Rules(
        lambda: Net(lambda m, x: m.c3(m.c1(x) + m.c2(x)), **convs(3)), ("c1", "c2", "c3"), adds=1
    ),
    "product of two convolutions": Rules(
        lambda: Net(lambda m, x: m.c3(m.c1(x) * m.c2(x)), **convs(3)), ("c1", "c2", "c3"), others=("mul",),
        differs="product of two tensors", ours=("c1", "c2", "c3"),
    ),
    "concat": Rules(
        lambda: Net(lambda m, x: m.c4(torch.cat([F.relu(m.c1(x)), F.relu(m.c2(x))], 1)), c1=conv(16, 16), c2=conv(16, 16),
                    c4=conv(32, 16)),
        ("c1", "c2", "c4"), differs="pair after a concat", ours=("c1", "c2", "cat", "c4"),
    ),
    "max pool between convolutions": Rules(
        between(lambda x: F.max_pool2d(F.relu(x), 2)), ("c1", "c2"), others=("max_pool2d",),
        differs="pairs around a max pool or a nearest resize", ours=("c1", "c2"),
    ),
    "average pool": Rules(between(lambda x: F.avg_pool2d(F.relu(x), 2)), ("c1", "c2"), others=("avg_pool2d",)),
    "global pool and linear layer": Rules(
        lambda: Net(lambda m, x: m.fc(F.adaptive_avg_pool2d(F.relu(m.c1(x)), 1).flatten(1)), c1=conv(16, 16),
                    fc=nn.Linear(16, 16)),
        ("c1", "fc"), others=("adaptive_avg_pool2d",),
    ),
    "mean and linear layer": Rules(
        lambda: Net(lambda m, x: m.fc(F.relu(m.c1(x)).mean((2, 3))), c1=conv(16, 16), fc=nn.Linear(16, 16)), ("c1", "fc"),
        differs="mean over an image", ours=("c1", "mean", "fc"),
    ),
    "nearest resize": Rules(
        between(lambda x: F.interpolate(F.relu(x), scale_factor=2)), ("c1", "c2"), others=("interpolate",),
        differs="pairs around a max pool or a nearest resize", ours=("c1", "c2"),
    ),
    "linear resize": Rules(
        between(lambda x: F.interpolate(F.relu(x), scale_factor=2, mode="bilinear")), ("c1", "c2"), others=("interpolate",)
    ),
    "padding": Rules(between(lambda x: F.pad(F.relu(x), (1, 1, 1, 1))), ("c1", "c2")),
    "hard swish": Rules(
        between(F.hardswish), ("c1", "c2"), others=("hardswish",), differs="hard swish", ours=("c1", "c2")
    ),
    "GELU": Rules(between(F.gelu), ("c1", "c2")),
    "gate of squeeze and excitation": Rules(
        lambda: Net(squeeze_and_excite, **convs(4)), ("c1", "c2", "c3", "c4"), others=("adaptive_avg_pool2d", "mul"),
        differs="product of two tensors", ours=("c1", "c2", "c3", "c4", "adaptive_avg_pool2d"),
    ),
    "transposed convolution": Rules(
        lambda: Net(lambda m, x: m.c2(F.relu(m.up(F.relu(m.c1(x))))), up=nn.ConvTranspose2d(16, 16, 2, 2), **convs(2)),
        ("c1", "up", "c2"),
    ),
    "head of two branches": Rules(
        lambda: Net(lambda m, x: torch.cat([m.c3(F.silu(m.c1(x))), torch.sigmoid(m.c4(F.silu(m.c2(x))))], 1), **convs(4)),
        ("c1", "c2", "c3", "c4"),
    ),
    "attention of products": Rules(
        lambda: Net(attend, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), ("qkv", "out"), others=("matmul", "matmul_1"),
        x=torch.randn(2, 8, 16),
    ),
    "product of two linear layers": Rules(
        lambda: Net(lambda m, x: m.a(x) @ m.b(x).transpose(1, 2), a=nn.Linear(16, 16), b=nn.Linear(16, 16)), ("a", "b"),
        others=("matmul",), x=torch.randn(2, 8, 16),
    ),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TENSORRT)
def test_tensorrt(name: str) -> None:
    rules = TENSORRT[name]
    consumers = [consumer for _, consumer, _ in activations(rules.model(), rules.x, "tensorrt")]
    assert sum(consumer.startswith("add") for consumer in consumers) == (
        rules.our_adds if rules.differs else rules.adds
    )
    found = {consumer for consumer in consumers if not consumer.startswith("add")}
    assert found == set(rules.ours if rules.differs else (*rules.layers, *rules.others))


# ---- openvino, by the reference graphs of NNCF


@dataclass(frozen=True)
class Reference:
    """A reference graph: the ops that take quantized tensors, and sets of ops whose tensors have one scale."""

    model: Callable[[], nn.Module]
    quantized: Edges  # (what computes the tensor, what takes it)
    one_scale: tuple[Edges, ...] = ()
    more: Mapping[tuple[str, str], str] = field(default_factory=dict)  # what this package quantizes too: the reason
    fewer: Mapping[tuple[str, str], str] = field(default_factory=dict)  # what it leaves in float: the reason
    x: Tensor = field(default_factory=lambda: IMAGE)


def edges(*pairs: str) -> Edges:
    return frozenset((pair.split(">")[0], pair.split(">")[1]) for pair in pairs)


def squeeze(m: Any, x: Tensor) -> Tensor:
    y = m.c0(x)
    gate = torch.sigmoid(m.c2(F.relu(m.c1(y.mean((2, 3), keepdim=True)))))
    return torch.matmul(y * gate, m.w)


OPENVINO: Mapping[str, Reference] = {
    "convolution behind a difference": Reference(
        lambda: Net(lambda m, x: F.relu(m.c(x - m.s)), c=conv(16, 16), s=parameter(1, 16, 1, 1)), edges("sub>c")
    ),
    "shift and scale of an input": Reference(
        lambda: Net(lambda m, x: ((x + m.t) * m.u).transpose(2, 3), t=parameter(1, 16, 1, 1), u=parameter(1, 16, 1, 1)),
        edges(), more={("add", "mul"): "shift and scale of an input"},
    ),
    "shared weight": Reference(
        lambda: Net(lambda m, x: (m.c(x), m.c(x)), c=conv(16, 16)), edges("x>c", "x>c_1"), one_scale=(edges("x>c", "x>c_1"),)
    ),
    "squeeze and excitation": Reference(
        lambda: Net(squeeze, c0=conv(16, 3), c1=conv(3, 5), c2=conv(5, 3), w=parameter(8, 5)),
        edges("x>c0", "c0>mul", "c0>mean", "sigmoid>mul", "mul>matmul"), one_scale=(edges("c0>mul", "c0>mean"),),
        more={("mean", "c1"): "squeeze and excitation", ("relu", "c2"): "squeeze and excitation"},
    ),
    "attention": Reference(
        lambda: Net(lambda m, x: torch.matmul(torch.softmax(torch.matmul(x, m.w), -1), x), w=parameter(8, 8)),
        edges("x>matmul"),
        more={("softmax", "matmul_1"): "attention", ("x", "matmul_1"): "attention"},
    ),
    "group norm": Reference(
        lambda: Net(lambda m, x: F.relu(m.norm(m.c(x))) * m.s + m.t, c=conv(16, 4), norm=nn.GroupNorm(2, 4),
                    s=parameter(1, 4, 1, 1), t=parameter(1, 4, 1, 1)),
        edges("x>c", "c>norm", "relu>mul"), fewer={("c", "norm"): "layer norm"},
    ),
    "max pool": Reference(
        lambda: Net(lambda m, x: m.c2(F.max_pool2d(m.c1(x), 2)), c1=conv(16, 4), c2=conv(4, 4)), edges("x>c1", "c1>c2")
    ),
    "concat": Reference(
        lambda: Net(lambda m, x: m.c3(torch.cat([m.c1(x), m.c2(x)], 1)), c1=conv(16, 4), c2=conv(16, 4), c3=conv(8, 4)),
        edges("x>c1", "x>c2", "c1>cat", "c2>cat", "cat>c3"), one_scale=(edges("c1>cat", "c2>cat"),),
    ),
    "residual": Reference(
        lambda: Net(lambda m, x: m.c2(F.relu(m.c1(x) + x)), c1=conv(16, 16), c2=conv(16, 4)),
        edges("x>c1", "c1>add", "x>add", "relu>c2"), one_scale=(edges("x>c1", "x>add"),),
    ),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", OPENVINO)
def test_openvino(name: str) -> None:
    reference = OPENVINO[name]
    found = {(source, taker): q for source, taker, q in activations(reference.model(), reference.x, "openvino")}
    assert found.keys() == (reference.quantized | reference.more.keys()) - reference.fewer.keys()
    for group in reference.one_scale:
        assert len({found[edge] for edge in group}) == 1


def test_each_reason_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    reasons = {rules.differs for rules in TENSORRT.values() if rules.differs}
    for reference in OPENVINO.values():
        reasons |= {*reference.more.values(), *reference.fewer.values()}
    for reason in reasons:
        assert f"| {reason} |" in page, reason
