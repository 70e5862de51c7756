"""XNNPACK's arithmetic, against the formulas of its source in whole numbers, and against ExecuTorch."""

import math
import operator
import struct

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    """Convolutions, a depthwise one, sums, a product, a transposed convolution, pools and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.down, self.side = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Conv2d(4, 16, 1)
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Linear(16 * 64, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.first(x))
        y = torch.relu(self.depthwise(y) + y) * self.side(x)
        z = F.relu6(self.up(torch.relu(self.down(y))))
        return self.head(torch.flatten(F.max_pool2d(z, 2), 1)), y + z


def prepared(model: nn.Module, *inputs: Tensor) -> nn.Module:
    torch.manual_seed(0)
    result = qt.prepare(model.eval(), inputs, "xnnpack")
    qt.calibrate(result, [inputs], progress=False)
    return result


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_layers_sums_and_products_have_kernels() -> None:
    source = prepared(net(), X)
    model = qt.convert(source, arithmetic="integer")
    kernels = {name: how.kernel for name, how in model.plan.computed.items() if how.kernel}
    layers = dict.fromkeys(("first", "depthwise", "down", "side", "up", "head"), "qs8 sums")
    assert kernels == {**layers, "add": "qs8 add", "add_1": "qs8 add", "mul": "qs8 mul"}
    for ours, simulated in zip(model(X), qt.convert(source)(X), strict=True):
        assert torch.allclose(ours, simulated, atol=0.1)


class Both(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.op(x, y)


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def sum_in_fixed_point(a: int, b: int, ra: float, rb: float, zero_points: tuple[int, int, int]) -> int:
    """The code of a sum, as microparams-init.c and qs8-vadd compute it."""
    az, bz, yz = zero_points
    shift = 20 - ((bits(max(ra, rb)) >> 23) - 127)
    factors = [round(math.ldexp(r, shift)) for r in (ra, rb)]
    bias = (1 << (shift - 1)) - factors[0] * az - factors[1] * bz
    return min(max(((bias + a * factors[0] + b * factors[1]) >> shift) + yz, -128), 127)


def test_a_sum_is_computed_in_fixed_point() -> None:
    x, y = torch.randn(400) * 3, torch.rand(400) * 2 - 0.3
    model = qt.convert(prepared(Both(operator.add), x, y), arithmetic="integer")
    a, b, out = (m for name, m in model.named_modules() if name.startswith("activation_quantizers."))
    zero_points = tuple(int(grid.zero_point) for grid in (a, b, out))
    ra, rb = (float(grid.scale / out.scale) for grid in (a, b))
    codes = out.codes(model(x, y)).tolist()
    pairs = zip(a.codes(x).tolist(), b.codes(y).tolist(), strict=True)
    assert codes == [sum_in_fixed_point(i, j, ra, rb, zero_points) for i, j in pairs]


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (lambda x, y: F.relu6(x + y), "fuses only a ReLU"),
        (torch.sub, "an unknown order of roundings"),
    ],
)
def test_what_has_no_kernel_says_why(op, words: str) -> None:
    model = qt.convert(prepared(Both(op), torch.randn(8, 4), torch.randn(8, 4)), arithmetic="integer")
    reasons = [how.why for how in model.plan.computed.values() if how.kernel is None]
    assert any(words in reason for reason in reasons)
    assert not any(how.kernel for how in model.plan.computed.values())


def test_every_code_is_executorchs(tmp_path) -> None:
    pytest.importorskip("executorch")
    model = qt.convert(prepared(net(), X), arithmetic="integer")
    result = qt.export.export_executorch(model, X, tmp_path / "m.pte")
    assert result.end_to_end is not None
    assert result.end_to_end.codes.compared > 100_000
    assert result.end_to_end.codes.differing == 0
    assert result.end_to_end.output_difference == 0
    result.end_to_end.check()
