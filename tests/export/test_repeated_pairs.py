"""Q/DQ pairs behind ops that move codes: onnxruntime computes on codes what the integer model says, and no code differs."""

from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import lint, verify

X = torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(0))
POW2 = qt.QConfig(
    qt.QuantSpec(8, signed=False, symmetric=False, pow2_scale=True), qt.QuantSpec(8, axis=0, pow2_scale=True)
)


class Branches(nn.Module):
    """An op on a large and on a small map, between convolutions."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], channels: int = 16) -> None:
        super().__init__()
        self.large, self.small = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.last, self.function = nn.Conv2d(channels, 16, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.function(self.large(x), self.small(x))))


def integer_form(model: nn.Module, config: qt.QConfig | None = None) -> nn.Module:
    mapping = None if config is None else qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(model.eval(), X[:1], "onnxruntime", mapping)
    qt.calibrate(prepared, [X], progress=False)
    return qt.convert(prepared, arithmetic="integer")


def in_float(integer: nn.Module, path: object) -> list[str]:
    """Check that no code differs, and that lint finds nothing; return the kernels that compute in float."""
    found = verify(integer, X, path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0, found
    assert lint(path, "onnxruntime") == ()
    return [layer.kernel for layer in found.float_layers]


def pyramid(x: Tensor) -> Tensor:
    """Max pools of max pools, joined, as YOLO's SPPF has them."""
    pools = [x]
    for _ in range(3):
        pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
    return torch.cat(pools, 1)


def halved(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


BEHIND_POOLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "SPPF": (lambda large, small: pyramid(halved(large) + small[:, 8:]), 32),
    "cat": (lambda large, small: torch.cat([halved(large), small], 1), 24),
    "pad, add": (lambda large, small: F.pad(halved(large), (0, 0, 0, 0, 0, 8)) + small, 16),
    "slice, add": (lambda large, small: halved(large)[:, :, 1:] + small[:, 8:, 1:], 8),
    "split, add": (lambda large, small: torch.add(*halved(small).chunk(2, 1)) + halved(halved(large)), 8),
    "resize, cat, add": (
        lambda large, small: torch.cat([F.interpolate(halved(halved(large)), scale_factor=2)] * 2, 1) + small,
        16,
    ),
    "indices": (
        lambda large, small: F.pad(F.max_pool2d(large, 2, return_indices=True)[0], (0, 0, 0, 0, 0, 8)) + small,
        16,
    ),
    "global": (lambda large, small: F.adaptive_max_pool2d(small, 1)[:, 8:] + halved(large), 8),
    "global, expand": (lambda large, small: F.adaptive_max_pool2d(large, 1).expand(-1, -1, 24, 24) + small[:, 8:], 8),
    "max over dims": (lambda large, small: small.amax((2, 3), True)[:, 8:] + halved(large), 8),
    "max over rows": (
        lambda large, small: small.max(-1, keepdim=True)[0][:, 8:] + large.min(1, True).values[:, :, ::2, ::2],
        8,
    ),
    "tile": (lambda large, small: halved(halved(large)).repeat(1, 2, 2, 2) + small, 16),
    "edges": (lambda large, small: F.pad(halved(large), (1, 1, 1, 1), "reflect")[:, :, 1:-1, 1:-1] + small[:, 8:], 8),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 18), ("torchscript", 13), ("dynamo", 22)])
@pytest.mark.parametrize("config", [None, POW2], ids=["any scale", "powers of two"])
@pytest.mark.parametrize("name", BEHIND_POOLS)
def test_no_code_differs_behind_a_max_pool(
    tmp_path, name: str, config: qt.QConfig | None, exporter: str, opset: int
) -> None:
    integer = integer_form(Branches(*BEHIND_POOLS[name]), config)
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx", exporter=exporter, opset=opset).path
    assert set(in_float(integer, path)) - {"Pad", "MaxPool"} == {
        "Tanh"
    }  # neither pads, nor pools with positions, on codes
    if "add" in name:
        assert integer.plan.computed["add"].kernel == "QLinearAdd"


@pytest.mark.parametrize(
    "move",
    [lambda x: torch.cat([x, x], 1), lambda x: F.pad(x, (1, 1, 1, 1)), lambda x: F.interpolate(x, scale_factor=2)],
    ids=["cat", "pad", "resize"],
)
def test_an_op_whose_output_is_also_returned_keeps_no_layer_in_float(tmp_path, move) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(move(torch.zeros(1, 4, 1, 1)).shape[1], 8, 3)
            self.last = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = move(torch.relu(self.first(x)))
            return torch.tanh(self.last(torch.relu(self.second(y)))), y

    integer = integer_form(Returned())
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    assert not {"Conv", "FusedConv"} & set(in_float(integer, path))


class Segmenter(nn.Module):
    """A block that pools with positions and pads the channels of what it pools, and one that places the values back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.narrow, self.last = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        pooled, positions = F.max_pool2d(x, 2, return_indices=True)
        y = torch.relu(F.pad(pooled, (0, 0, 0, 0, 0, 8)) + torch.relu(self.inner(x)))
        return torch.tanh(self.last(F.max_unpool2d(self.narrow(y), positions, 2) + x))


def test_no_code_of_a_segmenter_differs(tmp_path) -> None:
    integer = integer_form(Segmenter())
    assert [integer.plan.computed[name].kernel for name in ("add", "add_1")] == ["QLinearAdd"] * 2
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    assert {"Add", "Conv", "Concat", "FusedConv"}.isdisjoint(in_float(integer, path))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "compute",
    [
        lambda large, small: (F.interpolate(small, scale_factor=2, mode="bilinear"), large),
        lambda large, small: (F.pad(small, (1, 1, 1, 1), value=0.3), large[:, :, :26, :26]),
    ],
    ids=["linear resize", "padding with a number"],
)
@pytest.mark.parametrize("joined", [False, True])
def test_values_that_are_on_no_grid_have_no_pair_to_repeat(tmp_path, compute, joined: bool) -> None:
    def function(large: Tensor, small: Tensor) -> Tensor:
        y, other = compute(large, small)
        return torch.tanh(torch.cat([y, other], 1)) if joined else torch.tanh(y)[:, :8] + other

    integer = integer_form(Branches(function, 24 if joined else 8))
    path = qt.export_onnx(integer, X, tmp_path / "m.onnx").path
    in_float(integer, path)
    proto = onnx.load(path).graph
    taken = {node.input[0] for node in proto.node if node.op_type == "QuantizeLinear"}
    computed = [node.output[0] for node in proto.node if node.op_type in ("Resize", "Pad")]
    assert computed
    assert taken.isdisjoint(computed)


class Latents(nn.Module):
    """Learned queries of an attention whose keys have another width, one set for each image of the batch."""

    def __init__(self, spread: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.queries, self.spread = nn.Parameter(torch.randn(5, 32)), spread
        self.attend, self.last = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.spread(self.queries, len(x))
        y, _ = self.attend(queries, x, x, need_weights=False)
        return self.last(y + queries)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "spread",
    [
        lambda q, n: q.unsqueeze(0).expand(n, -1, -1),
        lambda q, n: q.repeat(n, 1, 1),
        lambda q, n: torch.stack([q] * n),
        lambda q, n: q[None],
        lambda q, n: torch.layer_norm(q.unsqueeze(0).expand(n, -1, -1), (32,)),
    ],
    ids=["expand", "repeat", "stack", "one", "normalized"],
)
def test_no_code_differs_behind_a_parameter(tmp_path, spread: Callable[[Tensor, int], Tensor], exporter: str) -> None:
    """onnxruntime would round its products again, by MatMulNBits: they are of constants, which are not between pairs."""
    torch.manual_seed(0)
    x = torch.randn(1 if spread(torch.zeros(1, 32), 4).shape[0] == 1 else 4, 6, 24)
    prepared = qt.prepare(Latents(spread).eval(), x, "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    path = qt.export_onnx(qt.convert(prepared), x, tmp_path / "m.onnx", exporter=exporter).path
    found = verify(qt.convert(prepared, arithmetic="integer"), x, path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0, found
    assert "MatMulNBits" not in {layer.kernel for layer in found.layers}
