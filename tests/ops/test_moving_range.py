"""grid_of_range against the oracle; observe_fake_quant against the three ops it is made of, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qtoolkit as qt
from qtoolkit import ops
from tests import reference
from tests.cases import (
    CHANNELS,
    FLOATS,
    LAYOUTS,
    Channels,
    any_grid,
    any_tensor,
    assert_laid_out_as,
    assert_same,
    floats,
    layout_cases,
    leaf,
    name_of,
)

native = torch.ops.qtoolkit
KEPT = (torch.float32, torch.float64)
CODES = [(-128, 127), (-127, 127), (0, 255), (1, 15), (0, 1), (-8, 7), (-32768, 32767), (-(2**31), 2**31 - 1)]
NAN, INF = torch.nan, torch.inf


# ---- the grid of a range ----------------------------------------------------------------------------------------------


def some_ranges(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ends = [0.0, -0.0, 1.0, -1.0, 0.1, -3.7, 127.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, INF, -INF, NAN, 2.0**-126]
    pairs = torch.cartesian_prod(torch.tensor(ends, dtype=torch.float64), torch.tensor(ends, dtype=torch.float64))
    anywhere = torch.randn(2000, 2, dtype=torch.float64) * 2.0 ** torch.randint(-30, 30, (2000, 1))
    return tuple(torch.cat([pairs, anywhere]).to(dtype).T.contiguous())


@pytest.mark.parametrize("dtype", KEPT, ids=name_of)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pow2_scale", [False, True])
def test_grid_of_range(dtype, codes, symmetric, pow2_scale):
    lo, hi = some_ranges(dtype)
    scale, zero_point = ops.grid_of_range(lo, hi, *codes, symmetric, pow2_scale)
    wanted_scale, wanted_zero_point = reference.grid_of_range(lo, hi, *codes, symmetric, pow2_scale)
    assert_same(scale, wanted_scale)
    if symmetric:
        assert zero_point is None
    else:
        assert_same(zero_point, wanted_zero_point)


def test_numbers_worked_out_by_hand():
    def grid(lo: float, hi: float, *how) -> list[float]:
        scale, zero_point = ops.grid_of_range(torch.tensor(lo), torch.tensor(hi), *how)
        return [scale.item()] if zero_point is None else [scale.item(), zero_point.item()]

    assert grid(-14.0, 3.0, -8, 7) == [2.0]
    assert grid(-14.0, 3.0, 0, 3) == [1.0]
    assert grid(-14.0, 3.0, 1, 3) == [1.0]
    assert grid(-1.0, 3.0, 1, 5, False) == [1.0, 2.0]
    assert grid(-1.0, 3.0, 0, 4, False) == [1.0, 1.0]
    assert grid(2.0, 6.0, -2, 1, False) == [2.0, -2.0]
    assert grid(-6.0, -3.0, -2, 1, False) == [2.0, 1.0]
    assert grid(-2.5, 5.0, 0, 3, False) == [2.5, 1.0]
    assert grid(-1.25, 1.25, 0, 1, False) == [2.5, 0.0]  # half to even: no code for the upper half
    assert grid(0.0, 0.0, -8, 7) == [1.0]
    assert grid(INF, -INF, -8, 7, False) == [1.0, -8.0]  # nothing seen
    assert grid(-3.0, 9.0, -8, 3, True, True) == [4.0]
    assert grid(-3.0, 12.0, -8, 3, True, True) == [4.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=name_of)
def test_shape_of_the_grid_is_the_ranges(shape):
    lo, hi = -torch.rand(shape), torch.rand(shape)
    for t in ops.grid_of_range(lo, hi, symmetric=False):
        assert t.shape == shape
    stepped = torch.rand(4, 3).t()
    assert_same(ops.grid_of_range(-stepped, stepped)[0], ops.grid_of_range(-stepped.clone(), stepped.contiguous())[0])


# ---- the fused op -----------------------------------------------------------------------------------------------------


def new_state(count: int, kept: torch.dtype, symmetric: bool) -> tuple[Tensor | None, ...]:
    lo, hi, scale = (torch.full((count,), v, dtype=kept) for v in (INF, -INF, NAN))
    return lo, hi, scale, None if symmetric else torch.zeros(count, dtype=kept)


def in_turn(x: Tensor, state, qmin, qmax, momentum, pow2_scale, axis, group, block_size=0) -> Tensor:
    lo, hi, scale, zero_point = state
    ops.observe_minmax_(x.detach(), lo, hi, momentum, axis, group, block_size)
    grid = ops.grid_of_range(lo, hi, qmin, qmax, zero_point is None, pow2_scale)
    scale.copy_(grid[0])
    if zero_point is not None:
        zero_point.copy_(grid[1])
    return ops.fake_quant(x, scale, zero_point, qmin, qmax, axis, group, block_size)


def check(batches: list[Tensor], channels: Channels, kept=torch.float32, symmetric=True, codes=(-8, 7), **how) -> None:
    count = channels.count(batches[0])
    mine, theirs = (new_state(count, kept, symmetric) for _ in range(2))
    how = {"momentum": None, "pow2_scale": False, **channels.named, **how}
    for x in batches:
        inputs = [leaf(x) for _ in range(2)]
        y = ops.observe_fake_quant(inputs[0], *mine, *codes, **how)
        wanted = in_turn(inputs[1], theirs, *codes, **how)
        assert_same(y, wanted)
        assert_laid_out_as(y, x, channels.group)
        for got, want in zip(mine, theirs, strict=True):
            assert got is want is None or assert_same(got, want) is None
        grad = floats(x.dtype, 7)(*x.shape)
        gradients = [torch.autograd.grad(t, i, grad)[0] for t, i in zip((y, wanted), inputs, strict=True)]
        assert_same(*gradients)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_every_layout(layout, channels, dtype):
    check([layout(floats(dtype, seed)) for seed in range(2)], channels, momentum=0.1, symmetric=False)


@pytest.mark.parametrize("kept", KEPT, ids=name_of)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("codes", [(-8, 7), (-127, 127), (0, 255)], ids=str)
@pytest.mark.parametrize("momentum", [None, 0.01, 1.0])
@pytest.mark.parametrize("pow2_scale", [False, True])
def test_every_kind_of_grid(kept, symmetric, codes, momentum, pow2_scale):
    batches = [floats(torch.float32, seed)(4, 6, 50) for seed in range(3)]
    how = {"kept": kept, "symmetric": symmetric, "codes": codes, "momentum": momentum, "pow2_scale": pow2_scale}
    check(batches, Channels(1), **how)


@given(st.data())
def test_anything(data):
    x = data.draw(any_tensor())
    channels = data.draw(any_grid(x))[2]
    how = {"momentum": data.draw(st.sampled_from([None, 0.3])), "symmetric": data.draw(st.booleans())}
    check([x, x * 2], channels, **how)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_not_finite_is_seen_as_by_the_ops_in_turn(bad, momentum, symmetric):
    x = floats(torch.float32)(3, 50)
    broken = x.clone()
    broken[1, 7] = bad
    check([x, broken, x], Channels(0), momentum=momentum, symmetric=symmetric)
    state = new_state(3, torch.float32, symmetric)
    ops.observe_fake_quant(broken, *state, -8, 7, momentum, axis=0)
    assert torch.isfinite(state[2]).tolist() == [True, False, True]


def test_an_empty_batch_leaves_the_range():
    x = floats(torch.float32)(2, 6)
    check([x, x[:0], x], Channels(1), momentum=0.1)


@pytest.mark.parametrize("differentiable", [False, True])
def test_what_it_writes_counts_as_changed_once(differentiable):
    x, state = floats(torch.float32)(50).requires_grad_(differentiable), new_state(1, torch.float32, False)
    y, mask = native.observe_fake_quant(x, *state, -8, 7)
    assert [t._version for t in state] == [1, 1, 1, 1]
    assert (y.requires_grad, mask.numel(), mask.requires_grad) == (differentiable, 7 * differentiable, False)


# ---- errors -----------------------------------------------------------------------------------------------------------


def call(x=(4, 6), lo=6, hi=6, scale=6, zero_point=6, kept=torch.float32, **how):
    state = (torch.ones(n, dtype=k) for n, k in ((lo, torch.float32), (hi, torch.float32), (scale, kept)))
    z = None if zero_point is None else torch.ones(zero_point)
    return ops.observe_fake_quant(torch.ones(x), *state, z, **{"axis": 1, **how})


def taken(**changed):
    given = {"lo": torch.ones(3), "hi": torch.ones(3), "scale": torch.ones(3), "zero_point": None}
    ops.take_range_(**{**given, "count": torch.tensor([0, 0]), "clock": torch.tensor(1), **changed})


REFUSED = {
    "taken_scale": (
        lambda: taken(scale=torch.ones(4)),
        ValueError,
        "take_range_: scale must have as many elements as lo",
    ),
    "taken_count": (
        lambda: taken(count=torch.tensor(0)),
        ValueError,
        r"take_range_: count must be contiguous and have 2 elements, a time and a number of steps, got shape \[\]",
    ),
    "taken_clock": (lambda: taken(clock=torch.tensor(1.0)), TypeError, "take_range_: clock must be int64, got Float"),
    "taken_clocks": (lambda: taken(clock=torch.ones(2).long()), ValueError, "take_range_: clock must have one element"),
    "lo": (lambda: call(lo=5), ValueError, "observe_fake_quant: lo must have 6 elements, one per channel, got 5"),
    "scale": (
        lambda: call(scale=1),
        ValueError,
        "observe_fake_quant: scale must have as many elements as lo, 6, got 1",
    ),
    "zero_point": (
        lambda: call(zero_point=3),
        ValueError,
        "observe_fake_quant: zero_point must have as many elements as lo, 6, got 3",
    ),
    "dtype": (
        lambda: call(kept=torch.float64),
        TypeError,
        "observe_fake_quant: scale must have the dtype of lo, Float, got Double",
    ),
    "codes": (
        lambda: call(zero_point=None, qmin=-3, qmax=0),
        ValueError,
        r"observe_fake_quant: qmax must be positive if there is no zero point, got \[-3, 0\]",
    ),
    "momentum": (lambda: call(momentum=2.0), ValueError, r"observe_fake_quant: momentum must lie in \(0, 1\]"),
    "stepped": (
        lambda: ops.observe_fake_quant(torch.ones(4, 6), torch.ones(6), torch.ones(6), torch.ones(12)[::2], axis=1),
        ValueError,
        "observe_fake_quant: scale must be contiguous, since it is updated in place",
    ),
    "learned": (
        lambda: ops.observe_fake_quant(torch.ones(3), torch.ones(1), torch.ones(1), torch.ones(1, requires_grad=True)),
        NotImplementedError,
        r"observe_fake_quant: scale must not require grad, since the op has no gradient for it; pass scale.detach\(\)\.",
    ),
    "range_dtype": (
        lambda: ops.grid_of_range(torch.ones(3).half(), torch.ones(3).half()),
        TypeError,
        r"grid_of_range: lo must be float32 or float64, got Half; convert it with .float\(\)",
    ),
    "range_dtypes": (
        lambda: ops.grid_of_range(torch.ones(3), torch.ones(3).double()),
        TypeError,
        "grid_of_range: hi must have the dtype of lo, Float, got Double",
    ),
    "range_shape": (
        lambda: ops.grid_of_range(torch.ones(3), torch.ones(4)),
        ValueError,
        r"grid_of_range: hi must have the shape of lo, \[3\], got \[4\]",
    ),
    "range_codes": (
        lambda: ops.grid_of_range(torch.ones(3), torch.ones(3), -3, 0),
        ValueError,
        "grid_of_range: qmax must be positive if there is no zero point",
    ),
}


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_error(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


# ---- the rest of torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"axis": 1}, {"axis": 1, "group": 2}, {"axis": 1, "momentum": 0.1, "mask": True}])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_opcheck(how, layout, differentiable):
    x = LAYOUTS[layout](floats(torch.float32))
    count = 6 * how.get("group", 1) if "axis" in how else 1
    state = new_state(count, torch.float32, symmetric=differentiable)
    torch.library.opcheck(native.observe_fake_quant.default, (leaf(x) if differentiable else x, *state, -8, 7), how)


def test_opcheck_of_a_grid_that_takes_a_range():
    given = torch.randn(4), torch.randn(4), torch.ones(4), torch.zeros(4), torch.tensor([0, 0]), torch.tensor(1)
    torch.library.opcheck(native.take_range_.default, (*given, -8, 7, 200))


def test_opcheck_of_the_grid():
    for symmetric in (True, False):
        torch.library.opcheck(native.grid_of_range.default, (torch.randn(4), torch.randn(4), -8, 7, symmetric))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compiled_quantizer_trains_with_a_moving_range(backend, symmetric):
    torch._dynamo.reset()
    spec = qt.QuantSpec(bits=4, axis=1, symmetric=symmetric, observer="moving_average")
    mine, theirs = (qt.TensorQuantizer(spec, 6) for _ in range(2))
    mine.observing = theirs.observing = True
    compiled = torch.compile(mine, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(3):
        x = leaf(floats(torch.float32, seed)(4 + seed, 6, 50))
        got, wanted = compiled(x), theirs(x)
        assert_same(got, wanted)
        assert_same(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])
    for got, wanted in zip(mine.buffers(), theirs.buffers(), strict=True):
        assert_same(got, wanted)


def test_export():
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, t in zip(["lo", "hi", "scale", "zero_point"], new_state(6, torch.float32, False), strict=True):
                self.register_buffer(name, t)

        def forward(self, x: Tensor) -> Tensor:
            return ops.observe_fake_quant(x, self.lo, self.hi, self.scale, self.zero_point, axis=1) + 1

    x, other = floats(torch.float32)(2, 6, 9), floats(torch.float32, 3)(5, 6, 9)
    program = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for exported in (program, program.run_decompositions()):
        assert_same(exported.module()(other), Module()(other))


@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
def test_meta_tensors_agree_with_real_ones(channels):
    def run(device: str) -> list[tuple]:
        x = LAYOUTS["channels_last"](lambda *n: torch.zeros(*n, device=device))
        state = (torch.ones(channels.count(x), device=device) for _ in range(4))
        skipped = torch.zeros(channels.count(x), dtype=torch.int64, device=device)
        found = native.observe_fake_quant(x, *state, -8, 7, None, False, False, *channels.named.values(), skipped, True)
        return [(t.shape, t.dtype, t.stride()) for t in found]

    assert run("meta") == run("cpu")


# ---- the quantizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("how", [{}, {"axis": 1}, {"symmetric": False, "signed": False}, {"pow2_scale": True}], ids=str)
def test_quantizer_with_a_moving_range(observer, how):
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=4, observer=observer, **how))
    quantizer.observing = True
    spec = quantizer.spec
    state = new_state(6 if spec.axis == 1 else 1, torch.float32, spec.symmetric)
    momentum = 0.1 if observer == "moving_average" else None
    for seed in range(3):
        x = floats(torch.float32, seed)(4, 6, 50)
        wanted = in_turn(x, state, spec.qmin, spec.qmax, momentum, spec.pow2_scale, spec.axis, 1)
        assert_same(quantizer(x), wanted)
        assert quantizer.ready
        assert_same(quantizer.scale.view(-1), state[2])
        assert spec.symmetric or assert_same(quantizer.zero_point.view(-1), state[3]) is None


def test_quantizer_with_a_moving_histogram():
    quantizer = qt.TensorQuantizer(qt.QuantSpec(observer="histogram"))
    quantizer.observing = True
    x = floats(torch.float32)(4, 6, 50)
    y = quantizer(x)
    scale, _ = ops.grid_of_range(*quantizer.observer.range())
    assert_same(quantizer.scale, scale)
    assert_same(y, ops.fake_quant(x, scale))
