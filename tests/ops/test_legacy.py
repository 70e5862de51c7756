"""tensor_quant and fake_tensor_quant: the numerics of pytorch-quantization, against the oracle and its published numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    FLOATS,
    LAYOUTS,
    RUNS,
    SIZES,
    SPECIAL,
    assert_laid_out_as,
    assert_same,
    floats,
    leaf,
    name_of,
)

native = torch.ops.qtoolkit
GRIDS = [
    (bits, unsigned, narrow)
    for bits in (2, 4, 8, 16)
    for unsigned, narrow in ((False, True), (False, False), (True, True))
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g[0]}{'u' if g[1] else 's'}{'n' if g[2] else ''}")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def ranges(x: Tensor, axis: int | None) -> Tensor:
    """Ranges that clamp some elements, with the dimensions kept; the first is zero where there are several."""
    if axis is None:
        return torch.tensor(5.3)
    amax = 1 + 7 * torch.rand(x.size(axis), generator=torch.Generator().manual_seed(1))
    amax[0] = 0
    return amax.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])


def check(x: Tensor, amax: Tensor, grid: tuple = (8, False, True)) -> None:
    wanted_codes, wanted_scale, wanted, inside = reference.tensor_quant(x, amax, *grid)
    codes, scale, code_mask = native.tensor_quant(x, amax, *grid, True)
    y, mask = native.fake_tensor_quant(x, amax, *grid, True)
    assert_same(codes, wanted_codes)
    assert_same(scale, wanted_scale)
    assert_same(y, wanted)
    bits = reference.packed(inside, y)
    assert torch.equal(mask, bits)
    assert torch.equal(code_mask, bits)
    for result in (codes, y):
        assert_laid_out_as(result, x)


def layout_cases() -> list:
    shapes = {name: layout(torch.empty) for name, layout in LAYOUTS.items()}
    return [
        pytest.param(LAYOUTS[name], axis, id=f"{name}-{axis}")
        for name, x in shapes.items()
        for axis in (None, 0, 1, -1)
        if axis is None or (-x.dim() <= axis < x.dim() and x.size(axis) > 0)
    ]


# ---- values -----------------------------------------------------------------------------------------------------------


def test_published_numbers():
    x = torch.tensor([0.5043, 0.8178, 0.4798, 0.9201, 0.6819, 0.6900, 0.6925, 0.3804, 0.4479, 0.4954])
    wanted = [0.5071, 0.8187, 0.4782, 0.9201, 0.6810, 0.6883, 0.6955, 0.3840, 0.4492, 0.4927]
    y = ops.fake_tensor_quant(x, x.abs().max())
    assert [f"{v:.4f}" for v in y.tolist()] == [f"{v:.4f}" for v in wanted]
    codes, scale = ops.tensor_quant(x, x.abs().max())
    assert codes.tolist() == [70, 113, 66, 127, 94, 95, 96, 53, 62, 68]
    assert_same(scale, 127 / x.abs().max())
    assert_same(codes / scale, y)


@grids
@dtypes
def test_ranges_of_codes(grid, dtype):
    x = floats(dtype)(4, 6, 50)
    check(x, torch.tensor(3.0), grid)
    check(x, ranges(x, 1), grid)
    codes, _, _ = native.tensor_quant(x, torch.tensor(3.0), *grid)
    high = 2 ** (grid[0] - 1 + grid[1]) - 1
    low = 0 if grid[1] else -high if grid[2] else -high - 1
    assert (codes.min().item(), codes.max().item()) == tuple(torch.tensor([low, high]).to(dtype).tolist())


@pytest.mark.sweep(2)
@dtypes
@pytest.mark.parametrize(("layout", "axis"), layout_cases())
def test_layouts(layout, axis, dtype):
    x = layout(floats(dtype))
    check(x, ranges(x, axis))


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run):
    x = floats(torch.bfloat16)(*run)
    check(x, ranges(x, 1))


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    check(floats(torch.float32)(size), torch.tensor([2.5]))


@given(st.floats(width=32), st.floats(0, 2.0**100, width=32))
def test_any_numbers(x, amax):
    check(torch.tensor([x, -x, amax, -amax]), torch.tensor(amax))


@dtypes
def test_special_values(dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(20)
    for amax in (1.0, 1e-7, 1e30, torch.inf, torch.nan):
        check(x, torch.tensor(amax))


@pytest.mark.parametrize("amax", [0.0, 1e-30, 2.0**-25, 2.0**-24])
def test_a_range_of_nothing_gives_zeros(amax):
    x, amax = torch.tensor([-1.0, 0.0, 2.0**-24, 5.0]), torch.tensor(amax)
    codes, scale = ops.tensor_quant(x, amax)
    assert_same(codes, torch.zeros(4))
    assert_same(scale, torch.tensor(1.0))
    assert_same(ops.fake_tensor_quant(x, amax), torch.zeros(4))
    above = torch.tensor(2.0**-24).nextafter(torch.tensor(1.0))
    assert ops.tensor_quant(x, above)[0].tolist() == [-127, 0, 127, 127]


def test_half_precision_is_computed_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        x, amax = floats(dtype)(1000), torch.tensor(7.3).to(dtype)
        assert_same(ops.fake_tensor_quant(x, amax), ops.fake_tensor_quant(x.float(), amax.float()).to(dtype))


def test_shapes_of_amax():
    x = floats(torch.float32)(4, 6, 50)
    one, each = torch.tensor(3.0), 1 + torch.rand(6)
    for shape in ((), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)):
        assert_same(ops.fake_tensor_quant(x, one.reshape(shape)), ops.fake_tensor_quant(x, one))
        assert ops.tensor_quant(x, one.reshape(shape))[1].shape == shape
    assert_same(ops.fake_tensor_quant(x, each.reshape(6, 1)), ops.fake_tensor_quant(x, each.reshape(1, 6, 1)))
    for axis, wanted in ((0, 4), (1, 6), (2, 50)):
        check(x, ranges(x, axis))
        assert ranges(x, axis).numel() == wanted
    square = floats(torch.float32)(6, 6)  # the axis is told by the shape of amax, not by its length
    assert_same(
        ops.fake_tensor_quant(square, each),
        torch.stack([ops.fake_tensor_quant(c, a) for c, a in zip(square.T, each, strict=True)]).T,
    )
    check(square, each.reshape(6, 1))


# ---- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@dtypes
@pytest.mark.parametrize(("layout", "axis"), layout_cases())
def test_gradient(layout, axis, dtype):
    """Of the codes too it is the incoming one, without the multiplier: as in pytorch-quantization."""
    x, amax = layout(floats(dtype)), ranges(layout(floats(dtype)), axis)
    grad, inside = floats(dtype, 7)(*x.shape), reference.tensor_quant(x, amax)[3]
    for result in (lambda x: native.fake_tensor_quant(x, amax)[0], lambda x: native.tensor_quant(x, amax)[0]):
        given = leaf(x)
        result(given).backward(grad)
        assert_same(given.grad, torch.where(inside, grad, 0))


def test_gradient_at_the_end_of_the_range():
    x = leaf(torch.tensor([1.0, -1.0, 1.0000001, -1.0000001, torch.nan]))
    ops.fake_tensor_quant(x, torch.tensor(1.0)).sum().backward()
    assert x.grad.tolist() == [1, 1, 0, 0, 0]


def test_amax_has_no_gradient():
    x, amax = leaf(torch.ones(3)), leaf(torch.tensor(1.0))
    codes, scale = ops.tensor_quant(x, amax)
    assert codes.requires_grad
    assert not scale.requires_grad
    (codes.sum() + ops.fake_tensor_quant(x, amax).sum()).backward()
    assert amax.grad is None
    assert x.grad.tolist() == [2, 2, 2]


# ---- with the rest of torch -------------------------------------------------------------------------------------------


def opcheck_cases() -> dict[str, tuple]:
    x = floats(torch.float32)(4, 6, 5, 7)
    return {
        "per_tensor": (x, torch.tensor(3.0)),
        "unsigned": (x, torch.tensor([3.0]), 4, True),
        "masked": (x, torch.tensor(3.0), 8, False, False, True),
        "differentiable": (leaf(x), ranges(x, 1)),
        "channels_last": (leaf(x.to(memory_format=torch.channels_last)), ranges(x, 1)),
        "half": (leaf(x.half()), ranges(x, 1).half()),
        "sliced": (leaf(x[::2, :, 1:]), torch.tensor(3.0)),
        "empty": (leaf(x[:0]), torch.tensor(3.0)),
        "0-d": (leaf(x[0, 0, 0, 0]), torch.tensor(3.0)),
    }


@pytest.mark.parametrize("op", ["tensor_quant", "fake_tensor_quant"])
@pytest.mark.parametrize("args", opcheck_cases().values(), ids=opcheck_cases())
def test_opcheck(op, args):
    torch.library.opcheck(getattr(native, op).default, args)


def test_compile():
    def step(x: Tensor, amax: Tensor) -> Tensor:
        codes, scale = ops.tensor_quant(x, amax, 4)
        return (ops.fake_tensor_quant(x, amax) + codes / scale).relu()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((2, 6, 9), (5, 6, 33)):
        x, y = (leaf(floats(torch.float32)(*sizes)) for _ in range(2))
        assert_same(compiled(x, ranges(x, 1)), step(y, ranges(y, 1)))
        compiled(x, ranges(x, 1)).sum().backward()
        step(y, ranges(y, 1)).sum().backward()
        assert_same(x.grad, y.grad)


# ---- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [ops.tensor_quant, ops.fake_tensor_quant])
def test_legacy_errors(op):
    x, amax = torch.tensor([-0.1, 1.0]), torch.tensor(1.0)
    with pytest.raises(TypeError, match=r"^Negative values encountered in unsigned quantization\.$"):
        op(x, amax, 8, True)
    with pytest.raises(ValueError, match=r"^Negative values in amax$"):
        op(x, -amax)
    op(x.abs(), amax, 8, True)


def test_a_scale_too_large_for_float16():
    x = torch.ones(3, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^scale is too large for FP16 with amax=0\.001"):
        ops.tensor_quant(x, torch.tensor(0.001))
    ops.tensor_quant(x, torch.tensor(0.0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", ["tensor_quant", "fake_tensor_quant"])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"x": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "x must be float32, float64, bfloat16 or float16"),
        (
            {"amax": torch.ones(1, dtype=torch.int32)},
            TypeError,
            "amax must be float32, float64, bfloat16 or float16, got Int",
        ),
        ({"amax": torch.ones(4)}, ValueError, "got shape [4]; keep its reduced dimensions (keepdim=True)."),
        ({"amax": torch.ones(6, 1)}, ValueError, "amax must broadcast to the shape of x, [4, 6], got shape [6, 1]"),
        ({"amax": torch.ones(4, 1, 1)}, ValueError, "amax must broadcast to the shape of x, [4, 6], got shape"),
        ({"amax": torch.ones(0)}, ValueError, "amax must broadcast to the shape of x, [4, 6], got shape [0]"),
        ({"num_bits": 0}, ValueError, "num_bits must be 1 or more, got 0."),
        ({"num_bits": 65}, ValueError, "num_bits must be at most 64, got 65."),
    ],
)
def test_errors(change, error, sentence, op, device):
    given = {"x": torch.ones(4, 6), "amax": torch.ones(6)} | change
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(error) as raised:
        getattr(ops, op)(**given)
    assert str(raised.value).startswith(f"{op}: ")
    assert sentence in str(raised.value)
