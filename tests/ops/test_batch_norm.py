"""batch_norm_fake_quant and batch_norm_track_: against compositions of torch's ops in float64, and of this library's own."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from qtoolkit import ops
from tests.cases import FLOATS, assert_laid_out_as, assert_same, floats, leaf, name_of
from tests.ops.test_int4 import packed_in_memory
from tests.reference import Normalized, batch_norm

native = torch.ops.qtoolkit
INF = math.inf
ACTIVATIONS = {
    "none": (-INF, INF, 0.0),
    "relu": (0.0, INF, 0.0),
    "relu6": (0.0, 6.0, 0.0),
    "leaky": (0.0, INF, 0.1),
    "hardtanh": (-1.5, 2.0, 0.0),
}
SHAPES = {
    "matrix": (40, 3),
    "sequence": (3, 5, 33),
    "image": (4, 6, 5, 7),
    "whole_chunks": (2, 3, 8, 16),
    "many_channels": (3, 70, 9, 9),
    "small_planes": (3, 130, 2, 2),
    "points": (70, 64, 1, 1),
    "one_channel": (3, 1, 9, 50),
    "volume": (2, 5, 3, 4, 5),
    "large_planes": (2, 3, 70, 70),
    "many_rows": (600, 3, 5),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
GRID = {"qmin": -20, "qmax": 30, "grad_factor": 0.5}
REBUILT = {"residual_scale": torch.tensor(0.1), "residual_zero_point": torch.tensor(3.0)}


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=LAST[x.dim()]) if last else x


def layouts() -> list:
    return [
        pytest.param(shape, last, id=f"{name}-{'last' if last else 'contiguous'}")
        for name, shape in SHAPES.items()
        for last in (False, True)
        if not last or len(shape) in LAST
    ]


def tensors(
    shape: tuple, dtype: torch.dtype, *, last=False, divisor=True, residual="codes", quantized=True, channels=None
) -> dict:
    """Arguments by name. Weights and divisors of both signs, and a weight of zero; values from all over the grid."""
    c, kept = shape[1], channels or dtype
    given = {
        "x": laid_out(floats(dtype)(*shape) + 5, last),
        "weight": torch.randn(c).index_fill(0, torch.tensor([c // 2]), 0.0 if c > 1 else 1.0).to(kept),
        "bias": torch.randn(c).to(kept),
    }
    if divisor:
        given["divisor"] = (torch.rand(c) + 0.5).mul(torch.randn(c).sign()).to(kept)
    if residual != "none":
        codes = laid_out(torch.randint(-30, 30, shape, dtype=torch.int8), last)
        given["residual"] = ops.dequantize(codes, *REBUILT.values(), dtype=dtype)
        given |= {"residual_codes": codes, **REBUILT} if residual == "codes" else {}
    if quantized:
        given |= {"scale": torch.tensor(0.05).to(kept), "zero_point": torch.tensor(4.0).to(kept), **GRID}
    return given


def fused(activation: str, eps: float = 1e-3, **given) -> tuple[Tensor, ...]:
    low, high, slope = ACTIVATIONS[activation]
    x, weight, bias = (given.pop(name, None) for name in ("x", "weight", "bias"))
    return ops.batch_norm_fake_quant(x, weight, bias, eps, low=low, high=high, slope=slope, **given)


DIFFERENTIABLE = ("x", "weight", "bias", "divisor", "residual", "scale", "zero_point")


def gradients(f, grad: Tensor, **given) -> dict[str, Tensor]:
    given = {name: leaf(t) if name in DIFFERENTIABLE and t is not None else t for name, t in given.items()}
    inputs = {name: t for name, t in given.items() if name in DIFFERENTIABLE and t is not None}
    return dict(zip(inputs, torch.autograd.grad(f(**given), list(inputs.values()), grad), strict=True))


# ---- against the composition ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("last", [False, True])
def test_what_has_no_code_in_a_residual_is_not_lost(last, special):
    """Codes are for backward alone."""
    given = tensors((2, 3, 5, 4), torch.float32, last=last, quantized=False)
    given["residual"][1, 2, 3, 1] = special
    y, *_ = fused("none", **given)
    wanted, *_ = fused("none", **{n: t for n, t in given.items() if not n.startswith("residual_")})
    assert_same(y, wanted)
    assert not torch.isfinite(y[1, 2, 3, 1])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("residual", ["none", "values", "codes"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_float64(shape, last, activation, residual, quantized):
    """Values and every gradient. The composition rounds otherwise, so that a value may lie on the other side of a step."""
    given = tensors(shape, torch.float64, last=last, residual=residual, quantized=quantized)
    y = fused(activation, **given)[0]
    wanted = batch_norm(*ACTIVATIONS[activation], **given)
    torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9)
    assert_laid_out_as(y, given["x"])
    grad = torch.randn_like(y)
    got = gradients(lambda **g: fused(activation, **g)[0], grad, **given)
    want = gradients(lambda **g: batch_norm(*ACTIVATIONS[activation], **g), grad, **given)
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-8, atol=1e-7 * float(want[name].abs().max()))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[2:], ids=name_of)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_narrower_types(shape, last, dtype, activation):
    """Within a few roundings of the composition in float64."""
    given = tensors(shape, dtype, last=last, residual="values", quantized=False, channels=torch.float32)
    wide = {name: t.double() for name, t in given.items()}
    grad = torch.randn(shape).to(dtype)
    y = fused(activation, **given)[0]
    wanted = batch_norm(*ACTIVATIONS[activation], **wide)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wanted, rtol=2 * unit, atol=1e-5)
    got = gradients(lambda **g: fused(activation, **g)[0], grad, **given)
    want = gradients(lambda **g: batch_norm(*ACTIVATIONS[activation], **g), grad.double(), **wide)
    for name in got:
        assert got[name].dtype == given[name].dtype
        largest = float(want[name].abs().max())
        torch.testing.assert_close(got[name].double(), want[name], rtol=2 * unit, atol=1e-4 * largest)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_codes_are_those_of_the_value_before(shape, last, activation, dtype):
    """Bit for bit: 16-bit inputs compute in float32 throughout, so the value before is taken from float32."""
    given = tensors(shape, dtype, last=last)
    found = fused(activation, **given)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    wide = {name: t.to(kept) for name, t in given.items() if name in DIFFERENTIABLE[:5]}
    before = fused(activation, **wide)[0]
    grid = [given[name].to(kept) for name in ("scale", "zero_point")], -20, 30
    assert_same(found[0], ops.fake_quant(before, *grid[0], *grid[1:]).to(dtype))
    assert_same(found[1], ops.quantize(before, *grid[0], *grid[1:]))
    assert_laid_out_as(found[1], given["x"])


@pytest.mark.parametrize("ends", [(-8, 7), (0, 15)], ids=["signed", "unsigned"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_codes_of_four_bits_are_packed_in_the_order_of_memory(shape, last, dtype, ends):
    """The same codes; none where planes of an odd size would share bytes. Twelve more channels make images of two a byte."""
    for channels in (shape[1], 12):
        given = tensors((shape[0], channels, *shape[2:]), dtype, last=last)
        given["x"][0, 0] = torch.nan
        given |= {"scale": given["scale"] * 8, "qmin": ends[0], "qmax": ends[1]}
        y, codes, *_ = fused("relu", **given)
        other, found, *_ = fused("relu", **given, packs_codes=True)
        assert_same(other, y)
        of_plane = math.prod(shape[2:])
        is_odd = codes.is_contiguous() and channels > 1 and of_plane > 1 and of_plane % 2 == 1
        if is_odd:
            assert found.numel() == 0
        else:
            assert_same(found, packed_in_memory(codes))
            assert found.numel() == 0 or found.stride() == packed_in_memory(codes).stride()


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_gradients_through_the_grid(dtype, activation, learned):
    """Those of fake_quant, behind the op without a grid: the same bits in residual, and in sums within their rounding."""
    given = tensors((3, 70, 9, 9), dtype, residual="values")
    grid = {"scale": given.pop("scale"), "zero_point": given.pop("zero_point"), **GRID}
    grad = torch.randn(3, 70, 9, 9, dtype=dtype)
    names = ("x", "weight", "bias", "divisor", "residual", *(("scale", "zero_point") if learned else ()))

    def results(f) -> list[Tensor]:
        leaves = {name: leaf(t) if name in names else t for name, t in (given | grid).items()}
        return list(torch.autograd.grad(f(**leaves), [leaves[name] for name in names], grad))

    def apart(scale, zero_point, qmin, qmax, grad_factor, **g) -> Tensor:
        return ops.fake_quant(fused(activation, **g)[0], scale, zero_point, qmin, qmax, grad_factor=grad_factor)

    got, wanted = results(lambda **g: fused(activation, **g)[0]), results(apart)
    for name, g, w in zip(names, got, wanted, strict=True):
        if name in ("scale", "zero_point"):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6 * grad.numel())
        else:
            assert torch.equal(g, w), name


@pytest.mark.parametrize("scale", [0.05, 1e-3, 3.0, 0.0, -0.05, 1e-42, math.nan, INF, 1e30])
@pytest.mark.parametrize("zero_point", [0.0, 3.0, 200.0, math.nan])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_the_grid_passes(scale, zero_point, activation):
    """Exactly the elements that fake_quant passes, on steps and beside them, infinities and NaN."""
    x = torch.cat([torch.linspace(-3, 3, 2001), torch.tensor([-0.0, 1e30, -1e30])])[:, None]
    residual = floats(torch.float32)(2004, 1)
    residual[:3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    given = {"x": x, "weight": torch.full((1,), 1e-3), "bias": torch.zeros(1)}
    grid = {"scale": torch.tensor(scale), "zero_point": torch.tensor(zero_point), "qmin": -20, "qmax": 30}

    def apart(scale, zero_point, qmin, qmax, **g) -> Tensor:
        return ops.fake_quant(fused(activation, **g)[0], scale, zero_point, qmin, qmax)

    for f in (fused(activation, **given, residual=residual, **grid)[0], apart(**given, residual=residual, **grid)):
        assert_same(f, apart(**given, residual=residual, **grid))
    grad = torch.ones(2004, 1)
    wanted = gradients(apart, grad, **given, residual=residual, **grid)["residual"]
    got = gradients(lambda **g: fused(activation, **g)[0], grad, **given, residual=residual, **grid)["residual"]
    assert_same(got, wanted)


@pytest.mark.parametrize("residual", ["none", "values"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, residual):
    """Away from the kinks, by finite differences."""
    torch.manual_seed(1)
    given = tensors((3, 2, 5), torch.float64, residual=residual, quantized=False)
    given["x"] = torch.randn(3, 2, 5, dtype=torch.float64)
    given["weight"] = torch.tensor([0.7, -1.3], dtype=torch.float64)
    names = [name for name in DIFFERENTIABLE if name in given]
    before = fused("none", **given)[0]
    ends = [end for end in ACTIVATIONS[activation][:2] if math.isfinite(end)]
    assert all((before - end).abs().min() > 1e-4 for end in ends)
    torch.autograd.gradcheck(
        lambda *t: fused(activation, **given | dict(zip(names, t, strict=True)))[0], [leaf(given[n]) for n in names]
    )


# ---- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_statistics(shape, last, dtype):
    x = laid_out(floats(dtype)(*shape), last)
    mean, variance = native.batch_norm_fake_quant(x, *[None] * 7, 0.0, [-1.0, 1.0, 0.0], None, None, [0, 1])[2:]
    dims = [0, *range(2, x.dim())]
    wanted_variance, wanted_mean = torch.var_mean(x.double(), dims, correction=0)
    assert mean.dtype == variance.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(mean.double(), wanted_mean, rtol=rtol, atol=rtol * float(wanted_variance.max().sqrt()))
    torch.testing.assert_close(variance.double(), wanted_variance, rtol=4 * rtol, atol=0.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("shape", "last"), layouts())
def test_totals_of_shares_are_those_of_all(shape, last, dtype):
    """What several processes add up gives the statistics of all, and from them on the bits of the oracle."""
    given = tensors(shape, dtype, last=last, residual="values")
    shares = [
        {**given, **{n: laid_out(given[n][:1] if first else given[n][1:], last) for n in ("x", "residual")}}
        for first in (True, False)
    ]
    own = [ops.batch_norm_totals(share["x"], divisor=share["divisor"]) for share in shares]
    terms = given["x"].double().transpose(0, 1).flatten(1) / given["divisor"].double()[:, None]
    wanted = torch.cat([terms.sum(1), terms.square().sum(1), torch.tensor([float(terms.size(1))])])
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    sums = own[0] + own[1]
    torch.testing.assert_close(sums[0], wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))
    assert torch.equal(sums[0], sums[1])
    dims = [0, *range(2, len(shape))]
    variance, mean = torch.var_mean(given["x"].double(), dims, correction=0)
    for share in shares:
        y, codes, *found = fused("relu", totals=sums, **share)
        torch.testing.assert_close(found[0].double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].double(), variance, rtol=1e-5, atol=0.0)
        names = ("x", "weight", "bias", "divisor", "residual", "scale", "zero_point")
        oracle = Normalized(
            **{n: share[n] for n in names},
            mean=found[0],
            variance=found[1],
            eps=1e-3,
            low=0.0,
            high=INF,
            slope=0.0,
            qmin=-20,
            qmax=30,
        )
        assert_same(y, oracle.y())
        assert codes.shape == y.shape


def test_totals_of_few_values():
    """Of one value, of none, and of no channel: other processes may have more."""
    one, none = torch.tensor([[3.0, -2.0]]), torch.ones(0, 2)
    totals = ops.batch_norm_totals(one)
    assert torch.equal(totals[0], torch.tensor([3.0, -2, 9, 4, 1]).double())
    assert torch.equal(ops.batch_norm_totals(none), torch.zeros(2, 5).double())
    assert torch.equal(ops.batch_norm_totals(torch.ones(4, 0, 3)), torch.zeros(2, 1).double())
    totals = totals + ops.batch_norm_totals(torch.tensor([[5.0, 2.0]]))
    for x in (one, none):
        y, _, mean, variance = ops.batch_norm_fake_quant(x, None, None, 0.0, totals=totals)
        assert torch.equal(mean, torch.tensor([4.0, 0.0]))
        assert torch.equal(variance, torch.tensor([1.0, 4.0]))
        assert torch.equal(y, -torch.ones_like(x))
    running = torch.zeros(2), torch.zeros(2)
    ops.batch_norm_track_(*running, mean, variance, 1.0, 0, totals=totals)
    assert torch.equal(torch.stack(running), torch.tensor([[4.0, 0.0], [2.0, 8.0]]))


def test_totals_have_no_gradient():
    totals = native.batch_norm_totals(leaf(torch.randn(4, 3)), None, None)
    with pytest.raises(
        NotImplementedError, match="^batch_norm_totals: has no gradient; batch_norm_fake_quant has the gradient of x"
    ):
        totals.sum().backward()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mean", [1e3, 1e5, -1e6])
def test_variance_far_from_zero(mean, last):
    x = laid_out(torch.randn(8, 5, 40, 41) + mean, last)
    found = fused("none", x=x)
    variance, middle = torch.var_mean(x.double(), [0, 2, 3], correction=0)
    torch.testing.assert_close(found[3].double(), variance, rtol=2e-5, atol=0.0)
    torch.testing.assert_close(found[2].double(), middle, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("last", [False, True])
def test_variance_with_one_outlier(last):
    """Also if it comes first, where a single shift would cancel."""
    x = torch.randn(8, 5, 40, 41)
    x[0, :, 0, 0] = 1e4
    found = fused("none", x=laid_out(x, last))[3]
    torch.testing.assert_close(found.double(), x.double().var([0, 2, 3], correction=0), rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("last", [False, True])
def test_values_that_are_no_numbers(last, value):
    """They make their channel NaN, and no other."""
    x = laid_out(torch.randn(3, 70, 9, 9), last)
    x[1, 3, 4, 5] = value
    y, wanted = fused("relu", x=x)[0], batch_norm(*ACTIVATIONS["relu"], x=x.double()).float()
    assert y[:, 3].isnan().all()
    assert torch.equal(y.isnan(), wanted.isnan())
    grads = [gradients(f, torch.ones_like(y), x=x)["x"] for f in (lambda x: fused("relu", x=x)[0],)]
    assert grads[0][:, 3].isnan().all()
    assert grads[0][:, :3].isfinite().all()


# ---- layouts and threads ----------------------------------------------------------------------------------------------

LAYOUTS = {
    "sliced": lambda make: make(8, 13, 5, 9)[::2, 1::2, :, 2:8:3],
    "channel_sliced_last": lambda make: make(4, 9, 5, 7).contiguous(memory_format=torch.channels_last)[:, 1:7],
    "transposed": lambda make: make(7, 5, 6, 4).transpose(0, 3),
    "permuted": lambda make: make(5, 4, 7, 6).permute(1, 3, 2, 0),
    "expanded": lambda make: make(4, 6, 1, 5).expand(4, 6, 7, 5),
    "offset": lambda make: make(4 * 6 * 35 + 1)[1:].view(4, 6, 5, 7),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_that_of_its_copy(layout, dtype):
    x = LAYOUTS[layout](floats(dtype))
    given = tensors(tuple(x.shape), dtype) | {"x": x}
    dense = torch.empty_like(x).copy_(x)
    copied = given | {"x": dense}
    for got, wanted in zip(fused("relu6", **given), fused("relu6", **copied), strict=True):
        assert_same(got, wanted)
    assert_laid_out_as(fused("relu6", **given)[0], x)
    grad = LAYOUTS[layout](floats(dtype, 7))
    got, wanted = (gradients(lambda **g: fused("relu6", **g)[0], grad, **g) for g in (given, copied))
    for name in got:
        assert_same(got[name], wanted[name])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(8, 64, 28, 28), (2, 3, 200, 200), (64, 500, 1, 1), (8, 200, 7, 7)], ids=name_of)
def test_threads_do_not_change_a_bit(shape, last):
    given = tensors(shape, torch.float32, last=last)

    def run(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            grads = gradients(lambda **g: fused("relu", **g)[0], torch.ones(shape).cos_(), **given)
            return [*fused("relu", **given), *grads.values()]
        finally:
            torch.set_num_threads(before)

    for one, more in itertools.product([run(1)], [run(2), run(3), run(1)]):
        for a, b in zip(one, more, strict=True):
            assert_same(a, b)


def test_large_results_are_streamed():
    x = torch.randn(4, 64, 128, 130)
    for last in (False, True):
        given = {"x": laid_out(x, last), "scale": torch.tensor(0.1), **GRID}
        part = {"x": laid_out(x[:, :7], last), "scale": torch.tensor(0.1), **GRID}
        for got, wanted in zip(fused("relu", **given), fused("relu", **part), strict=True):
            assert got.dim() == 1 or torch.equal(got[:, :7], wanted)
        got, wanted = (
            gradients(lambda **g: fused("relu", **g)[0], torch.ones_like(g["x"]), **g) for g in (given, part)
        )
        torch.testing.assert_close(got["x"][:, :7], wanted["x"])


# ---- what is kept, and what is refused --------------------------------------------------------------------------------


def test_what_backward_keeps():
    """x, its channels' values, and the residual's codes: neither the residual nor any value between."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    given = tensors((2, 64, 16, 16), torch.float32)
    given = {name: leaf(t) if name in DIFFERENTIABLE else t for name, t in given.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fused("relu", **given)
    assert sum(kept.values()) < given["x"].numel() * 5.3


def test_codes_that_do_not_fit():
    x = torch.randn(4, 3)
    for qmin, qmax, dtype in ((-128, 127, torch.int8), (0, 255, torch.uint8), (-8, 7, torch.int8)):
        assert fused("none", x=x, scale=torch.ones(1), qmin=qmin, qmax=qmax)[1].dtype == dtype
    for qmin, qmax in ((-1, 128), (0, 256), (-32768, 32767)):
        assert fused("none", x=x, scale=torch.ones(1), qmin=qmin, qmax=qmax)[1].numel() == 0
    assert fused("none", x=x)[1].numel() == 0


ONE, PAIR = torch.ones(1), torch.ones(2)
REFUSED = {
    "one_value": ({"x": torch.ones(1, 3)}, "x must have more than 1 value for each channel"),
    "empty_batch": ({"x": torch.ones(0, 3, 4)}, "x must have more than 1 value for each channel"),
    "vector": ({"x": torch.ones(3)}, "x must have at least 2 dimensions"),
    "weight": ({"weight": PAIR}, "weight must have one dimension of 3 elements, one for each channel, got shape [2]"),
    "scalar_bias": ({"bias": ONE}, "bias must have one dimension of 3 elements"),
    "divisor": ({"divisor": torch.ones(3, 1)}, "divisor must have one dimension of 3 elements"),
    "residual": ({"residual": torch.ones(4, 2)}, "residual must have the shape of x, [4, 3]"),
    "codes_alone": ({"residual_codes": torch.ones(4, 3).char()}, "residual_codes and residual_scale belong together"),
    "no_residual": (
        {"residual_codes": torch.ones(4, 3).char(), "residual_scale": ONE},
        "residual_codes require residual",
    ),
    "channels_of_scales": ({"scale": torch.ones(3)}, "scale must have 1 element, since the op has one grid"),
    "zero_point_alone": ({"zero_point": ONE}, "zero_point requires scale"),
    "eps": ({"eps": -1.0}, "eps must not be negative, got -1"),
    "ends": ({"low": 1.0, "high": 1.0}, "low must be less than high"),
    "totals": (
        {"totals": torch.ones(2, 6).double()},
        "totals must have the shape [2, 7], for two sums of each channel",
    ),
    "no_totals": (
        {"process_group": "0"},
        "process_group requires totals, got None; pass the result of batch_norm_totals()",
    ),
    "codes_range": ({"scale": ONE, "qmin": 3, "qmax": 3}, "qmin must be smaller than qmax"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    given, sentence = REFUSED[case]
    given = {"x": torch.randn(4, 3), "weight": None, "bias": None} | given
    with pytest.raises(ValueError, match="^batch_norm_fake_quant: ") as raised:
        ops.batch_norm_fake_quant(given.pop("x"), given.pop("weight"), given.pop("bias"), **given)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("activation", "codes", "sentence"),
    [
        ([0.0, 6.0], [0, 1], "activation must have low, high and slope, got [0, 6]."),
        ([0.0, 6.0, 0.0], [1], "range must have qmin and qmax, got [1]."),
    ],
)
def test_lists_of_other_lengths(activation, codes, sentence):
    with pytest.raises(ValueError, match=f"^batch_norm_fake_quant: {re.escape(sentence)}"):
        native.batch_norm_fake_quant(torch.randn(4, 3), *[None] * 7, 0.0, activation, None, None, codes)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"x": torch.ones(4, 3, dtype=torch.int32)}, "x must be float32, float64, bfloat16 or float16"),
        ({"residual": torch.ones(4, 3).half()}, "residual must have the dtype of x, Float, got Half"),
        (
            {"residual": torch.ones(4, 3), "residual_codes": torch.ones(4, 3).int(), "residual_scale": ONE},
            "residual_codes must be int8 or uint8",
        ),
        ({"totals": torch.ones(2, 7)}, "totals must be float64, got Float; pass the result of batch_norm_totals"),
    ],
)
def test_refused_types(given, sentence):
    given = {"x": torch.randn(4, 3)} | given
    with pytest.raises(TypeError, match=f"^batch_norm_fake_quant: {sentence}"):
        ops.batch_norm_fake_quant(given.pop("x"), None, None, **given)


def test_no_channels():
    y, codes, mean, variance = fused("relu", x=torch.ones(4, 0, 3), scale=ONE)
    assert (y.shape, codes.shape, mean.shape, variance.shape) == ((4, 0, 3), (4, 0, 3), (0,), (0,))


# ---- running statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("scaled", [False, True])
def test_tracking_is_that_of_torch(dtype, scaled):
    x = floats(torch.float64)(5, 6, 7)
    divisor, offset = torch.linspace(-2, 3.5, 6).double(), torch.randn(6).double()
    wanted = torch.nn.BatchNorm1d(6, momentum=0.3).double()
    wanted.running_mean.copy_(torch.linspace(-1, 1, 6))
    running = [wanted.running_mean.to(dtype), wanted.running_var.to(dtype)]
    wanted.running_mean.copy_(running[0])
    wanted(x / divisor[:, None] + offset[:, None] if scaled else x)
    mean, variance = fused("none", x=x)[2:]
    more = {"divisor": divisor, "offset": offset} if scaled else {}
    versions = [t._version for t in running]
    assert ops.batch_norm_track_(*running, mean, variance, 0.3, 35, **more) is None
    assert [t._version for t in running] == [v + 1 for v in versions]
    for got, want in zip(running, (wanted.running_mean, wanted.running_var), strict=True):
        torch.testing.assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"running_var": PAIR}, "running_var must have one dimension of 3 elements"),
        ({"mean": PAIR}, "mean must have one dimension of 3 elements"),
        ({"offset": PAIR}, "offset must have one dimension of 3 elements"),
        ({"momentum": 1.5}, r"momentum must lie in \[0, 1\], got 1.5"),
        ({"count": 1}, "count, the number of values of a channel, must be more than 1, got 1"),
        ({"running_mean": torch.ones(6)[::2]}, "running_mean and running_var must be contiguous"),
    ],
)
def test_refused_tracking(change, sentence):
    given = {name: torch.ones(3) for name in ("running_mean", "running_var", "mean", "variance")}
    with pytest.raises(ValueError, match=f"^batch_norm_track_: {sentence}"):
        ops.batch_norm_track_(**given | {"momentum": 0.1, "count": 4} | change)


# ---- scales in units of a weight ----


OF_STEP = {"held": torch.ones(4), "taken": torch.tensor(1), "clock": torch.tensor(1)}


def rescaled(**changes: Any) -> tuple[Tensor, dict[str, Any]]:
    """What batch_norm_rescale_ returns, and its arguments after it."""
    given: dict[str, Any] = {
        "start": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "rate": torch.ones(4),
        "known": torch.tensor([0.5, 0.0, 2.0, 1.0]),
        "variance": torch.tensor([0.25, 4.0, 1.0, torch.nan]),
        "gamma": torch.tensor([-1.0, 3.0, 0.0, 1.0]),
        "eps": 0.0,
    } | changes
    return ops.batch_norm_rescale_(**given), given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_take_the_change_of_the_factor(dtype):
    """By its magnitude: -2 after 0.5; the first one; a zero, which counts as 1, after 2; and NaN, which changes nothing."""
    state = {"start": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=dtype), "rate": torch.ones(4, dtype=dtype)}
    known = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=dtype)
    found, given = rescaled(**state, known=known)
    for name, wanted in {
        "start": [0.4, 0.2, 0.15, 0.4],
        "rate": [16.0, 1.0, 0.25, 1.0],
        "known": [2.0, 1.5, 1.0, 1.0],
    }.items():
        torch.testing.assert_close(given[name], torch.tensor(wanted, dtype=dtype))
    assert_same(found, given["variance"])
    assert found.data_ptr() != given["variance"].data_ptr()
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    ops.batch_norm_rescale_(**given)  # the same factor again
    for name, value in before.items():
        assert_same(given[name], value)


def test_one_scale_takes_the_root_of_the_mean_square():
    start, known = torch.tensor([0.1]), torch.tensor([1.0])
    rescaled(start=start, rate=None, known=known, variance=torch.tensor([0.25, 1.0, 4.0]), gamma=None)
    torch.testing.assert_close(known, torch.tensor([((4 + 1 + 0.25) / 3) ** 0.5]))
    torch.testing.assert_close(start, 0.1 * known)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_variance_is_held_until_the_clock_moves(scaled):
    """The scales take the factor of what is held."""
    held, taken, clock = torch.tensor([4.0]), torch.tensor(7), torch.tensor(7)
    start, known = (torch.tensor([0.1]), torch.tensor([0.5])) if scaled else (None, None)
    for shown, wanted in ((7, 4.0), (8, 0.25), (8, 0.25)):
        clock.fill_(shown)
        variance = torch.tensor([0.25])
        found = ops.batch_norm_rescale_(start, None, known, variance, None, 0.0, held, taken, clock)
        assert found.tolist() == held.tolist() == [wanted]
        assert found.data_ptr() not in (held.data_ptr(), variance.data_ptr())
        assert taken == shown
        if scaled:
            assert known == wanted**-0.5
            torch.testing.assert_close(start, 0.1 * known / 0.5)


def test_scales_that_were_set_within_a_step_are_for_the_running_variance():
    """They take the factor of the held one by which the step quantizes, and come back with the next step."""
    held, taken, clock = torch.tensor([4.0]), torch.tensor(7), torch.tensor(7)
    start, known = torch.tensor([0.1]), torch.zeros(1)
    for shown, wanted in ((7, 0.1 * (0.25 / 4.0) ** 0.5), (8, 0.1)):
        clock.fill_(shown)
        ops.batch_norm_rescale_(start, None, known, torch.tensor([0.25]), None, 0.0, held, taken, clock)
        torch.testing.assert_close(start, torch.tensor([wanted]))


def test_a_factor_that_vanishes_leaves_scales_that_come_back():
    start, rate, known = torch.tensor([0.1]), torch.tensor([1.0]), torch.tensor([1.0])
    for gamma in (1e-3, 1e-20, 1e-38, 0.0, -1e-38, 2.0):
        ops.batch_norm_rescale_(start, rate, known, torch.ones(1), torch.tensor([gamma]), 0.0)
        assert start > 0
        assert rate > 0
    torch.testing.assert_close(start, torch.tensor([0.2]))
    torch.testing.assert_close(rate, torch.tensor([4.0]))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"rate": PAIR}, ValueError, "rate is changed in place, .*, of as many elements as start, 4, .* got 2, Float"),
        ({"gamma": PAIR}, ValueError, "gamma must have as many elements as variance, 4, .* got 2 on cpu"),
        ({"variance": PAIR, "gamma": None}, ValueError, "start must have one element, or one for each .* 2, got 4"),
        ({"known": torch.ones(8)[::2]}, ValueError, "known is changed in place, so it must be contiguous"),
        ({"rate": torch.ones(4).double()}, ValueError, "rate is changed in place, .* got 4, Double on cpu"),
        ({"start": torch.ones(4).half()}, TypeError, "start must have dtype float32 or float64, got Half"),
        ({"gamma": torch.ones(4).long()}, TypeError, "gamma must have a floating-point dtype, got Long"),
        ({"eps": -1.0}, ValueError, "eps must not be negative, got -1"),
        ({"start": None}, ValueError, "start needs known, and known and rate need start"),
        ({"held": torch.ones(4)}, ValueError, "held, taken and clock are given together, or none of them is"),
        (OF_STEP | {"held": PAIR}, ValueError, "held is changed in place, .* as variance, 4, .* got 2, Float on cpu"),
        (OF_STEP | {"held": torch.ones(4).half()}, ValueError, "held is changed in place, .* got 4, Half on cpu"),
        (OF_STEP | {"clock": torch.ones(())}, ValueError, "clock must have one element of dtype int64 .* got 1, Float"),
        (OF_STEP | {"taken": torch.zeros(2).long()}, ValueError, "taken must have one element of dtype int64 .* got 2"),
    ],
)
def test_refused_rescaling(change, error, sentence):
    with pytest.raises(error, match=f"^batch_norm_rescale_: {sentence}"):
        rescaled(**change)


# ---- compilers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("last", [False, True])
def test_compiled_step_with_a_dynamic_batch(backend, last):
    def step(x: Tensor, weight: Tensor, scale: Tensor, running: list[Tensor]) -> Tensor:
        y, codes, mean, variance = ops.batch_norm_fake_quant(
            x * 1, weight, None, low=0.0, scale=scale, qmin=0, qmax=255, residual=x
        )
        ops.batch_norm_track_(*running, mean, variance, 0.1, x.numel() // x.size(1))
        return y * (codes > 3)

    torch._dynamo.reset()
    compilations, counter = None, torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for batch in (3, 4, 7):
        given = (
            laid_out(floats(torch.float32, batch)(batch, 6, 5, 7), last),
            torch.linspace(-1, 1, 6),
            torch.tensor(0.1),
        )
        found = []
        for f in (step, compiled):
            leaves, running = [leaf(t) for t in given], [torch.zeros(6), torch.ones(6)]
            y = f(*leaves, running)
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves), *running])
        for got, wanted in zip(*found, strict=True):
            assert_same(got, wanted)
        compilations = counter.frame_count if compilations is None else compilations
    assert counter.frame_count == compilations


def arguments(last: bool = False, **given) -> tuple:
    t = tensors((4, 6, 5, 7), torch.float32, last=last, **given)
    t = {name: leaf(v) if name in DIFFERENTIABLE else v for name, v in t.items()}
    names = ("divisor", "residual", "residual_codes", "residual_scale", "residual_zero_point")
    head = (t["x"], t["weight"], t["bias"], *(t.get(n) for n in names))
    return (*head, 1e-3, [0.0, 6.0, 0.0], t.get("scale"), t.get("zero_point"), [-20, 30], 0.5)


OPCHECKED = {
    "all": {},
    "last": {"last": True},
    "plain": {"divisor": False, "residual": "none", "quantized": False},
    "residual": {"residual": "values", "quantized": False},
}


@pytest.mark.parametrize("case", OPCHECKED)
def test_opcheck(case):
    args = arguments(**OPCHECKED[case])
    torch.library.opcheck(native.batch_norm_fake_quant.default, args)
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
    mean, variance = native.batch_norm_fake_quant(*detached)[2:]
    backward = (torch.randn(4, 6, 5, 7), detached[0], mean, variance, [True] * 7, *detached[1:])
    torch.library.opcheck(native.batch_norm_fake_quant_backward.default, backward)
    torch.library.opcheck(native.batch_norm_totals.default, (args[0].detach(), detached[3], detached[2]))
    totals = native.batch_norm_totals(detached[0], detached[3], None)
    torch.library.opcheck(native.batch_norm_fake_quant.default, (*args, totals))
    running = torch.zeros(6), torch.ones(6)
    torch.library.opcheck(native.batch_norm_track_.default, (*running, mean, variance, detached[3], None, 0.1, 140))


def test_double_backward_says_so():
    x = leaf(torch.randn(4, 3))
    (dx,) = torch.autograd.grad(fused("relu", x=x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^batch_norm_fake_quant: double backward is not supported"):
        dx.sum().backward()
