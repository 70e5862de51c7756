"""Gradients of fake_quant: against the oracle, torch's autograd, and finite differences; and what is kept for them.

dx is compared exactly. The sums for scale and zero point are compared within a bound that follows from how they are added
up: 64 lanes take at most 16 terms each before they are joined by a tree of 6 levels, which is 22 roundings of the arithmetic
type (where channels lie in a row, each of its places takes at most 17 terms), then in float64, at most one rounding an
element; at last one rounding to the scale's type.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    BLOCKS,
    CHANNELS,
    FLOATS,
    LAYOUTS,
    RUNS,
    SIZES,
    SPECIAL,
    Channels,
    any_grid,
    any_tensor,
    assert_laid_out_as,
    assert_same,
    floats,
    input_in_blocks,
    layout_cases,
    leaf,
    name_of,
    scales,
    zero_points,
)

GRID = {"qmin": -100, "qmax": 90}
backward = torch.ops.qtoolkit.fake_quant_backward.default


def learned_gradients(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, **grid) -> tuple[Tensor, ...]:
    inputs = [leaf(t) for t in (x, scale, zero_point) if t is not None]
    y = ops.fake_quant(inputs[0], inputs[1], inputs[2] if zero_point is not None else None, **grid)
    return torch.autograd.grad(y, inputs, grad)


def fixed_gradient(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, **grid) -> Tensor:
    x = leaf(x)
    return torch.autograd.grad(ops.fake_quant(x, scale, zero_point, **grid), x, grad)[0]


def assert_sum(got: Tensor, like: Tensor, wanted, mass, x: Tensor, apart=0.0) -> None:
    """`apart`: how far off the terms may be, in all."""
    assert (got.shape, got.dtype) == (like.shape, like.dtype)
    unit = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps / 2
    got, wanted, mass = got.double().reshape(-1), torch.from_numpy(wanted), torch.from_numpy(mass)
    info = torch.finfo(like.dtype)
    bound = (22 * unit + x.numel() * 2**-53) * mass + info.eps * wanted.abs() + max(info.tiny * info.eps, 1e-38)
    bound = bound + torch.as_tensor(apart)
    assert torch.equal(got.isnan(), wanted.isnan())
    same = got == wanted.to(like.dtype).double()  # infinities of the scale's type
    assert (same | ((got - wanted).abs() <= bound))[~wanted.isnan()].all()


def check_gradients(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, **grid) -> None:
    """Both backward ops against the oracle."""
    grid = GRID | grid
    wanted = reference.Gradients(grad, x, scale, zero_point, **grid)
    dx, ds, *dz = learned_gradients(grad, x, scale, zero_point, **grid)
    assert_same(dx, wanted.dx)
    assert_same(fixed_gradient(grad, x, scale, zero_point, **grid), wanted.dx)
    assert_sum(ds, scale, wanted.ds, wanted.ds_mass, x)
    if zero_point is not None:
        assert_sum(dz[0], zero_point, wanted.dz, wanted.dz_mass, x)


# ---- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_every_layout(layout, channels, dtype):
    x, count = layout(floats(dtype)), channels.count(layout(torch.empty))
    grad = floats(dtype, 7)(*x.shape)
    check_gradients(grad, x, scales(count), zero_points(count), **channels.named)
    check_gradients(layout(floats(dtype, 7)), x, scales(count), None, **channels.named, grad_factor=0.3)
    assert_laid_out_as(fixed_gradient(grad, x, scales(count), None, **channels.named), x, channels.group)
    assert_laid_out_as(learned_gradients(grad, x, scales(count), None, **channels.named)[0], x, channels.group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("group", [1, "batch"])
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run, group, dtype):
    channels = Channels(1, run[0] if group == "batch" else 1)
    x, count = floats(dtype)(*run), channels.count(torch.empty(run))
    check_gradients(floats(dtype, 7)(*run), x, scales(count), zero_points(count), **channels.named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("memory", ["row_major", "permuted"])
@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_blocks(block, memory, dtype):
    x, channels = input_in_blocks(block, memory, dtype)
    count = channels.count(x)
    check_gradients(floats(dtype, 7)(*x.shape), x, scales(count), zero_points(count), **channels.named)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, dtype):
    check_gradients(floats(dtype, 7)(size), floats(dtype)(size), scales(1), zero_points(1))


# Results that are written past the caches.
LARGE = {
    "per_tensor": ((4 << 20) + 65, None),
    "axis_0": (1433, 3000, 0),
    "axis_1": (3, 1433, 1000, 1),
    "a_row": (1433, 3000, 1),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("large", LARGE)
def test_large_results(large, dtype):
    *shape, axis = LARGE[large]
    x, grad = floats(dtype)(*shape), floats(dtype, 7)(*shape)
    count = 1 if axis is None else x.size(axis)
    check_gradients(grad, x, scales(count), zero_points(count), axis=axis)
    for zero_point in (None, zero_points(count)):
        grid = {**GRID, "axis": axis}
        assert_same(
            ops.fake_quant(x, scales(count), zero_point, **grid),
            reference.fake_quant(x, scales(count), zero_point, **grid),
        )


GRADS = {
    "row_major": lambda make: make(4, 6, 5, 7),
    "channels_last": lambda make: make(4, 6, 5, 7).contiguous(memory_format=torch.channels_last),
    "sliced": lambda make: make(8, 6, 5, 9)[::2, :, :, 1:8],
    "permuted": lambda make: make(5, 7, 4, 6).permute(2, 3, 0, 1),
    "of_a_sum": lambda make: make(1)[0].expand(4, 6, 5, 7),
    "of_a_mean_over_pixels": lambda make: make(4, 6, 1, 1).expand(4, 6, 5, 7),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", [name for name, f in LAYOUTS.items() if f(torch.empty).shape == (4, 6, 5, 7)])
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
def test_gradient_in_any_layout(grad, layout, channels):
    x, count = LAYOUTS[layout](floats(torch.float32)), channels.count(LAYOUTS[layout](torch.empty))
    check_gradients(GRADS[grad](floats(torch.float32, 7)), x, scales(count), zero_points(count), **channels.named)


@given(st.data())
def test_anything(data):
    x = data.draw(any_tensor())
    scale, zero_point, channels = data.draw(any_grid(x))
    grad = data.draw(st.sampled_from([floats(x.dtype, 7)(*x.shape), floats(x.dtype, 7)(1)[0].expand(x.shape)]))
    factor = data.draw(st.sampled_from([1.0, 0.01, -3.0, 0.0]))
    check_gradients(grad, x, scale, zero_point, **channels.named, grad_factor=factor)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("scale", [0.1, -0.1, 1e-30, 0.0, 1e30])
def test_special_values(dtype, scale):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    x = x[~x.isnan()].repeat(7)
    check_gradients(torch.ones_like(x) / 64, x, torch.tensor(scale, dtype=torch.float64), None)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
@pytest.mark.parametrize("group", [1, "batch"])
def test_nan_stays_in_its_channel(run, group):
    channels = Channels(1, run[0] if group == "batch" else 1)
    x, count = floats(torch.float32)(*run), channels.count(torch.empty(run))
    x[-1, -1, -1] = torch.nan
    check_gradients(torch.ones_like(x), x, scales(count), zero_points(count), **channels.named)


def test_gradient_of_clamped_elements_is_dropped_not_multiplied():
    x = torch.tensor([100.0, -100.0, torch.nan, 0.0, 0.0, 0.0])
    grad = torch.tensor([torch.nan, torch.inf, torch.inf, torch.nan, torch.inf, -0.0])
    wanted = torch.tensor([0.0, 0.0, 0.0, torch.nan, torch.inf, -0.0])
    assert_same(fixed_gradient(grad, x, torch.tensor(0.1), None), wanted)
    assert_same(learned_gradients(grad, x, torch.tensor(0.1), None)[0], wanted)


def test_inside_is_judged_after_rounding():
    x = torch.tensor([12.74, 12.75, 12.76, -12.84, -12.86])
    assert fixed_gradient(torch.ones(5), x, torch.tensor(0.1), None).tolist() == [1, 0, 0, 1, 0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_backward_op(layout, channels, dtype):
    """The op by itself: the mask that forward packed, and the memory order that it packed it in."""
    x, scale = layout(floats(dtype)), scales(channels.count(layout(torch.empty)))
    y, mask = torch.ops.qtoolkit.fake_quant(x, scale, None, **GRID, **channels.named, mask=True)
    order = [] if y.is_contiguous() else sorted(range(y.dim()), key=lambda d: -y.stride(d))
    grad = floats(dtype, 7)(*x.shape)
    dx = backward(grad, mask, order)
    assert_same(
        dx, torch.where(reference.inside(x, scale, None, -100, 90, **channels.named), grad, torch.zeros_like(grad))
    )
    assert_laid_out_as(dx, x, channels.group)


# ---- against torch ----------------------------------------------------------------------------------------------------


def straight_through(t: Tensor) -> Tensor:
    return t.detach().round() + (t - t.detach())  # exact, where t + (t.round() - t).detach() may miss by an ulp


def composed(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    z = straight_through(zero_point)
    level = straight_through(x / scale) + z
    q = torch.where((level >= qmin) & (level <= qmax), level, level.detach().clamp(qmin, qmax))
    return (q - z) * scale


@pytest.mark.parametrize(("axis", "count"), [(None, 1), (0, 4), (1, 6), (-1, 50)])
def test_plain_composition(axis, count):
    x, grad = (floats(torch.float64, seed)(4, 6, 50) for seed in (0, 7))
    scale, z = scales(count).double(), zero_points(count).double()
    shape = [1, 1, 1]
    if axis is not None:
        shape[axis] = count
    inputs = [leaf(x), leaf(scale.view(shape)), leaf(z.view(shape))]
    wanted = torch.autograd.grad(composed(*inputs, -100, 90), inputs, grad)
    got = learned_gradients(grad, x, scale.view(shape), z.view(shape), axis=axis, **GRID)
    for g, w in zip(got, wanted, strict=True):
        # a handful of roundings a term, and terms of up to 100 * |grad| <= 3000
        torch.testing.assert_close(g, w, rtol=1e-12, atol=3000 * x.numel() / count * 1e-15)


@pytest.mark.parametrize("grad_factor", [1.0, 0.25])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_torch_learnable_with_a_power_of_two(axis, grad_factor):
    """Dyadic numbers throughout: every sum is exact in float32, in any order. Zero points are even, as torch's
    backward adds them before it rounds, which moves ties by an odd one; and positive, as it truncates negative ones.
    """
    x = torch.randint(-600, 600, (4, 6, 50)) / 32
    grad = torch.randint(-3, 4, x.shape).float()
    count = 1 if axis is None else x.size(axis)
    scale, z = 2.0 ** torch.randint(-4, -1, (count,)), zero_points(count, low=0) * 2
    inputs = [leaf(x), leaf(scale), leaf(z)]
    if axis is None:
        theirs = torch._fake_quantize_learnable_per_tensor_affine(*inputs, -100, 90, grad_factor)
    else:
        theirs = torch._fake_quantize_learnable_per_channel_affine(*inputs, axis, -100, 90, grad_factor)
    wanted = torch.autograd.grad(theirs, inputs, grad)
    for g, w in zip(
        learned_gradients(grad, x, scale, z, axis=axis, grad_factor=grad_factor, **GRID), wanted, strict=True
    ):
        assert torch.equal(g, w)


def clamped(shape: tuple[int, ...]) -> Tensor:
    return (torch.randint(0, 2, shape) * 2 - 1).double() * 1000


SMALL = {name: channels for name, channels in CHANNELS.items() if channels.fit(torch.empty(4, 3, 2))}


@pytest.mark.parametrize("channels", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradcheck_in_scale(channels, sign):
    """Clamped elements are smooth in the scale (and constant in x); a negative scale counts by its magnitude."""
    x = clamped((4, 3, 2)).requires_grad_()
    count = channels.count(x)
    scale, z = (scales(count).double() * sign).requires_grad_(), zero_points(count).double()
    assert torch.autograd.gradcheck(lambda x, s: ops.fake_quant(x, s, z, **channels.named, **GRID), (x, scale))


@pytest.mark.parametrize("channels", SMALL.values(), ids=SMALL)
def test_gradcheck_in_zero_point(channels):
    """A zero point is rounded where used, so the differences are of whole codes: exact, clamped or well inside."""
    x = clamped((4, 3, 2)) * (torch.rand(4, 3, 2) < 0.5)
    count = channels.count(x)
    z = zero_points(count).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: ops.fake_quant(x, scales(count), z, **channels.named, **GRID), (z,), eps=1.0
    )


# ---- which gradients are computed, and what is saved for them ---------------------------------------------------------


@pytest.mark.parametrize("needed", ["x", "scale", "zero_point", "scale+zero_point", "x+zero_point"])
def test_only_what_requires_grad(needed):
    x, scale, z = floats(torch.float32)(4, 6, 50), scales(6), zero_points(6)
    wanted = reference.Gradients(torch.ones_like(x), x, scale, z, axis=1, **GRID)
    tensors = {"x": x, "scale": scale, "zero_point": z}
    for name in needed.split("+"):
        tensors[name].requires_grad_()
    ops.fake_quant(**tensors, axis=1, **GRID).sum().backward()
    assert {name for name, t in tensors.items() if t.grad is not None} == set(needed.split("+"))
    if x.grad is not None:
        assert_same(x.grad, wanted.dx)
    if scale.grad is not None:
        assert_sum(scale.grad, scale, wanted.ds, wanted.ds_mass, x)
    if z.grad is not None:
        assert_sum(z.grad, z, wanted.dz, wanted.dz_mass, x)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(6,), (1, 6, 1)], ids=name_of)
def test_gradient_has_the_scales_dtype_and_shape(x_dtype, dtype, shape):
    x = floats(x_dtype)(4, 6, 50)
    check_gradients(
        torch.ones_like(x) / 64, x, scales(6).to(dtype).view(shape), zero_points(6).to(dtype).view(shape), axis=1
    )


def test_gradient_of_a_scale_given_as_a_view():
    x, table = floats(torch.float32)(4, 6, 50), torch.stack([scales(6), torch.ones(6)], 1).requires_grad_()
    ops.fake_quant(x, table[:, 0], axis=1).sum().backward()
    ds = learned_gradients(torch.ones_like(x), x, scales(6), None, axis=1)[1]
    assert torch.equal(table.grad, torch.stack([ds, torch.zeros(6)], 1))


def test_no_graph_without_need():
    x = floats(torch.float32)(4, 6, 50)
    assert not ops.fake_quant(x, scales(1)).requires_grad
    with torch.no_grad():
        assert not ops.fake_quant(leaf(x), leaf(scales(1))).requires_grad
    with torch.inference_mode():
        assert_same(ops.fake_quant(x, scales(1)), ops.fake_quant(x, scales(1)).clone())


def saved_by(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **grid) -> list[Tensor]:
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = ops.fake_quant(x, scale, zero_point, **grid)
    assert y.requires_grad
    return kept


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(
    ("channels", "n"),
    [
        pytest.param(channels, n, id=f"{name}-{n}")
        for name, channels in CHANNELS.items()
        for n in (1, 7, 8, 50, 4097)
        if channels.fit(torch.empty(4, 30, n))
    ],
)
def test_fixed_scale_keeps_a_bit_an_element(dtype, channels, n):
    x = leaf(floats(dtype)(4, 30, n))
    count = channels.count(x)
    kept = saved_by(x, scales(count), zero_points(count), **channels.named)
    assert sum(t.untyped_storage().nbytes() for t in kept) == (x.numel() + 7) // 8


def test_learned_scale_keeps_its_inputs_and_copies_nothing():
    inputs = [leaf(LAYOUTS["channels_last"](floats(torch.bfloat16))), leaf(scales(6)), zero_points(6)]
    kept = saved_by(*inputs, axis=1)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}


def test_input_may_change_after_a_fixed_scale_but_not_a_learned_one():
    x = floats(torch.float32)(1000)
    source = leaf(x)
    h = source * 1
    y = ops.fake_quant(h, scales(1), **GRID)
    h.mul_(1000)
    y.sum().backward()
    assert_same(source.grad, reference.Gradients(torch.ones_like(x), x, scales(1), **GRID).dx)
    h = source * 1
    y = ops.fake_quant(h, leaf(scales(1)), **GRID)
    h.mul_(1000)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- higher order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "expanded", "0-d"])
def test_double_backward_of_the_square(layout):
    x = leaf(LAYOUTS[layout](floats(torch.float32)))
    y = ops.fake_quant(x, scales(1), **GRID)
    (dx,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    v = floats(torch.float32, 5)(*x.shape)
    (dxx,) = torch.autograd.grad(dx, x, v)
    inside = reference.inside(x, scales(1), **GRID)
    assert_same(dx, torch.where(inside, 2 * y, torch.zeros(())))
    assert_same(dxx.contiguous(), torch.where(inside, 2 * v, torch.zeros(())).contiguous())


def test_backward_op_is_linear_in_grad():
    x, grad = floats(torch.float64)(200), leaf(floats(torch.float64, 7)(200))
    mask = torch.ops.qtoolkit.fake_quant(x, scales(1), None, -100, 90, mask=True)[1]
    assert torch.autograd.gradcheck(lambda g: backward(g, mask, []), grad)
    assert torch.autograd.gradgradcheck(lambda g: backward(g, mask, []), grad)


def test_double_backward_of_a_learned_scale_says_that_there_is_none():
    x, scale = leaf(floats(torch.float32)(100)), leaf(scales(1))
    (ds,) = torch.autograd.grad((ops.fake_quant(x, scale) ** 2).sum(), scale, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^fake_quant: double backward .* pass scale\.detach\(\) and"):
        ds.backward()


def test_second_order_of_a_fixed_scale_is_that_of_torch():
    """The derivative of the straight-through gradient. Finite differences see the steps instead, for both."""

    def second_order(f) -> Tensor:
        x = leaf(torch.linspace(-1, 1, 41, dtype=torch.float32))
        (dx,) = torch.autograd.grad((f(x) ** 3 * x).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)[0]

    zero_point = torch.zeros((), dtype=torch.int32)
    theirs = second_order(lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.125), zero_point, -8, 7))
    assert_same(second_order(lambda x: ops.fake_quant(x, torch.tensor(0.125), None, -8, 7)), theirs)
    assert theirs.any()


def test_checkpointing_gives_the_same_gradients():
    x, scale = floats(torch.float32)(4, 6, 50), scales(6)
    inputs = leaf(x), leaf(scale)
    y = torch.utils.checkpoint.checkpoint(lambda x, s: ops.fake_quant(x * 2, s, axis=1), *inputs, use_reentrant=False)
    got = torch.autograd.grad(y.sum(), inputs)
    inputs = leaf(x), leaf(scale)
    wanted = torch.autograd.grad(ops.fake_quant(inputs[0] * 2, inputs[1], axis=1).sum(), inputs)
    for g, w in zip(got, wanted, strict=True):
        assert_same(g, w)


# ---- determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("channels", [Channels(), Channels(0), Channels(1), Channels(-1), Channels(1, 4)], ids=str)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(dtype, channels, threads):
    x, grad = (floats(dtype, seed)(4, 70, 777) for seed in (0, 7))
    count = channels.count(x)
    results = []
    for number in (1, 1, 2, 2, 3):
        threads(number)
        results.append(learned_gradients(grad, x, scales(count), zero_points(count), **channels.named, **GRID))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert_same(got, wanted)


def test_straight_through_gives_a_value_the_gradient_of_another_tensor():
    value, through = torch.tensor([-0.0, float("inf"), float("nan")]), leaf(torch.ones(3))
    y = torch.ops.qtoolkit.straight_through(leaf(value), through)
    assert_same(y, value)
    (grad,) = torch.autograd.grad(y, through, torch.tensor([1.0, 2.0, 3.0]), create_graph=True)
    assert grad.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="^straight_through: through must have the shape of value, .3., got .2."):
        torch.ops.qtoolkit.straight_through(value, torch.ones(2))
    with pytest.raises(TypeError, match="^straight_through: through must have the dtype of value, Float, got Double"):
        torch.ops.qtoolkit.straight_through(value, torch.ones(3, dtype=torch.float64))
