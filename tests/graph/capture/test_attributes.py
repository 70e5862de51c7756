"""Tensors in attributes, lists, caches and modules of Python: what a forward reads of them, and what it stores there."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.model_state import values_kept

CAPTURES = ("trace", "export")


def check(model: nn.Module, x: Tensor, capture: str = "trace") -> nn.Module:
    """Prepare a model, which is as before then, and compare both in float, before and after a conversion."""
    before = copy.deepcopy(model)
    prepared = qt.prepare(model, x, "onnxruntime", capture=capture)
    with torch.no_grad():
        expected = before(x)
        assert torch.equal(model(x), expected)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), expected)
    qt.calibrate(prepared, [x], progress=False)
    assert qt.convert(prepared)(x).shape == expected.shape
    return prepared


# ---- expanded views


class Expanded(nn.Module):
    """A grid that is an expanded view, as detectors keep the places of their anchors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 4, 1)
        grid = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 1, 8, 8)
        if "buffer" in kind:
            self.register_buffer("grid", grid)
        else:
            self.grid = [grid] if kind == "list" else grid

    def forward(self, x: Tensor) -> Tensor:
        grid = 0 if "unused" in self.kind else self.grid[0] if self.kind == "list" else self.grid
        return self.conv(x) + grid


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", ["buffer", "unused buffer", "attribute", "list"])
def test_a_tensor_that_is_an_expanded_view_is_kept(kind: str, capture: str) -> None:
    check(Expanded(kind).eval(), torch.rand(2, 3, 8, 8), capture)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(2, 3),
        torch.zeros(1, 1).expand(4, 0),
        torch.zeros(()),
        torch.zeros(4).as_strided((3, 2), (1, 1)),
        torch.eye(3).to_sparse(),
    ],
    ids=["expanded", "empty", "scalar", "overlapping", "sparse"],
)
def test_values_of_any_tensor_are_put_back(tensor: Tensor) -> None:
    before = tensor.clone()
    with values_kept([tensor]):
        if tensor.layout is torch.strided and tensor.dim() and len(tensor):
            tensor[:1, :1].fill_(7)
    assert torch.equal(tensor.to_dense(), before.to_dense())
