"""Query, key and value of one layer, as training takes them apart: the same values and gradients, and one copy less."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.program.views import PermutedParts, unbind_permuted
from tests.graph.program.test_unit import SPECS, Ops

Taken = Callable[[Tensor], tuple[Tensor, ...]]
TAKEN: dict[str, Taken] = {
    "timm": lambda qkv: qkv.permute(2, 0, 3, 1, 4).unbind(0),
    "tuple": lambda qkv: qkv.permute((2, 0, 3, 1, 4)).unbind(),
    "negative": lambda qkv: qkv.permute(0, 3, 1, 4, -3).unbind(-1),
    "functions": lambda qkv: torch.unbind(torch.permute(qkv, dims=(0, 3, 2, 1, 4)), dim=2),
    "keywords": lambda qkv: torch.unbind(input=torch.permute(input=qkv, dims=(2, 0, 3, 1, 4))),
    "keyword": lambda qkv: qkv.permute(2, 0, 3, 1, 4).unbind(dim=0),
}


class Attention(nn.Module):
    def __init__(self, take: Taken) -> None:
        super().__init__()
        self.qkv, self.out, self.take = nn.Linear(16, 48), nn.Linear(16, 16), take

    def forward(self, x: Tensor) -> Tensor:
        batch, places, _ = x.shape
        q, k, v = self.take(self.qkv(x).reshape(batch, places, 3, 2, 8))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, places, 16))


def trained(model: nn.Module, x: Tensor, specs: str = "fixed") -> tuple[list[Tensor], int]:
    """Return the output and the gradients of a step, and the copies that backward makes."""
    torch.manual_seed(0)
    weight, activation = SPECS[specs]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    prepared = qt.prepare(model.train(), x, backend="tensorrt", qconfig_mapping=mapping, training_arithmetic="float")
    qt.calibrate(prepared, [x], progress=False)
    y = prepared.train()(x)
    with Ops() as ops:
        y.sum().backward()
    gradients = [parameter.grad for parameter in prepared.parameters() if parameter.grad is not None]
    return [y.detach(), *gradients], ops.found["aten::clone"] + ops.found["aten::copy_"]


@pytest.mark.parametrize("specs", ["fixed", "lsq"])
@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_gradients_of_query_key_and_value_are_not_copied(take, specs, monkeypatch):
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = Attention(take)
    found, copies = trained(model, x, specs)
    monkeypatch.setattr(PermutedParts, "of", lambda node: None)
    expected, copies_of_torch = trained(model, x, specs)
    assert len(found) > 4
    assert all(map(torch.equal, found, expected))
    assert (copies, copies_of_torch) == (0, 1)


class ReadAgain(Attention):
    """Reads the permuted tensor elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v) + parts.mean(0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def test_another_reader_sees_the_permuted_tensor(monkeypatch):
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = ReadAgain(TAKEN["timm"])
    found, _ = trained(model, x)
    monkeypatch.setattr(PermutedParts, "of", lambda node: None)
    expected, _ = trained(model, x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dim", range(4))
def test_every_order(dim):
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    for dims in permutations(range(4)):
        parts, expected = unbind_permuted(x, dims, dim), x.permute(dims).unbind(dim)
        assert len(parts) == len(expected)
        for part, other in zip(parts, expected, strict=True):
            assert torch.equal(part, other)
            assert part.stride() == other.stride()
        weights = [torch.randn_like(part) for part in parts]
        ours, theirs = (
            torch.autograd.grad(sum((p * w).sum() for p, w in zip(each, weights, strict=True)), x)[0]
            for each in (parts, expected)
        )
        assert torch.equal(ours, theirs)
