"""fake_quant_: the values of fake_quant written over x, its gradient, and autograd's rules for what changes in place."""

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    CHANNELS,
    FLOATS,
    LAYOUTS,
    RUNS,
    SIZES,
    Channels,
    assert_same,
    floats,
    layout_cases,
    leaf,
    name_of,
    scales,
    zero_points,
)

native = torch.ops.qtoolkit
GRID = {"qmin": -100, "qmax": 90}
WRITABLE = [case for case in layout_cases() if not case.id.startswith(("expanded", "overlapping"))]


def check_values(x: Tensor, channels: Channels) -> None:
    """In x's own memory and strides, and with the mask of fake_quant."""
    count = channels.count(x)
    for z in (None, zero_points(count)):
        y, mask = native.fake_quant(x, scales(count), z, -100, 90, *channels.named.values(), 1.0, True)
        mine = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
        mine = mine.as_strided(x.shape, x.stride(), x.storage_offset())
        bits = native.fake_quant_(mine, scales(count), z, -100, 90, *channels.named.values(), True)
        assert_same(mine, y)
        assert_same(mine, reference.fake_quant(x, scales(count), z, -100, 90, **channels.named))
        assert torch.equal(bits, mask)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), WRITABLE)
def test_every_layout(layout, channels, dtype):
    check_values(layout(floats(dtype)), channels)


@pytest.mark.parametrize("group", [1, "batch"])
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run, group):
    check_values(floats(torch.float32)(*run), Channels(1, run[0] if group == "batch" else 1))


@pytest.mark.parametrize("size", [*SIZES, (4 << 20) + 65])
def test_sizes(size):
    check_values(floats(torch.float32)(size), Channels())


def test_what_lies_between_the_elements_is_left_alone():
    whole = floats(torch.float32)(8, 13)
    x = whole.clone()
    ops.fake_quant_(x[::2, 1:9:2], scales(1))
    whole[::2, 1:9:2] = ops.fake_quant(whole[::2, 1:9:2], scales(1))
    assert_same(x, whole)


def test_returns_its_input_and_keeps_no_memory():
    x = floats(torch.float32)(50)
    before = x.data_ptr()
    assert ops.fake_quant_(x, scales(1)) is x
    assert (x.data_ptr(), x._version) == (before, 1)


# ---- gradient ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "transposed", "permuted", "0-d", "empty"])
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
def test_gradient_is_that_of_fake_quant(layout, channels):
    shape = LAYOUTS[layout](torch.empty)
    if not channels.fit(shape):
        channels = Channels()
    source, s, z = leaf(LAYOUTS[layout](floats(torch.float32))), scales(channels.count(shape)), None
    found = []
    for op in (ops.fake_quant_, ops.fake_quant):
        h = source.as_strided(source.shape, source.stride()) * 1
        y = op(h, s, z, **GRID, **channels.named)
        assert (y is h) == (op is ops.fake_quant_)
        assert h._version == (op is ops.fake_quant_)
        found.append((y, *torch.autograd.grad(y, source, floats(torch.float32, 7)(*y.shape))))
    for got, wanted in zip(*found, strict=True):
        assert_same(got, wanted)


def test_gradient_through_a_slice_of_what_goes_on():
    """The slice is a view: what it is cut from has the history too."""
    source, grad = leaf(floats(torch.float32)(4, 6)), floats(torch.float32, 7)(4, 6)
    h = source * 2
    ops.fake_quant_(h[:, 1:3], scales(1), **GRID)
    wanted = source * 2
    wanted = torch.cat([wanted[:, :1], ops.fake_quant(wanted[:, 1:3], scales(1), **GRID), wanted[:, 3:]], 1)
    assert_same(h, wanted)
    assert_same(torch.autograd.grad(h, source, grad)[0], torch.autograd.grad(wanted, source, grad)[0])


def test_incoming_gradient_is_not_written_over():
    """A sum hands one gradient to both of its terms."""
    source = leaf(torch.tensor([100.0, 0.1]))
    h = source * 1
    y = ops.fake_quant_(h, scales(1), **GRID) + source * 3
    grad = torch.ones(2)
    assert torch.autograd.grad(y, source, grad)[0].tolist() == [3.0, 4.0]
    assert grad.tolist() == [1.0, 1.0]


def test_keeps_a_bit_an_element():
    kept: list[Tensor] = []
    h = leaf(floats(torch.float32)(4, 6, 50)) * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.fake_quant_(h, scales(1))
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 150)]


def test_what_an_op_has_saved_must_not_change():
    h = leaf(floats(torch.float32)(50)).sigmoid()
    ops.fake_quant_(h, scales(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_parameters_change_without_autograd():
    x = leaf(floats(torch.float32)(50))
    wanted = ops.fake_quant(x.detach(), scales(1))
    with torch.no_grad():
        ops.fake_quant_(x, scales(1))
    assert x.grad_fn is None
    assert_same(x.detach(), wanted)


REFUSED = {
    "leaf": (
        lambda: ops.fake_quant_(leaf(torch.ones(3)), scales(1)),
        RuntimeError,
        "x must not be a leaf tensor that requires grad",
    ),
    "view_of_a_leaf": (
        lambda: ops.fake_quant_(leaf(torch.ones(3))[1:], scales(1)),
        RuntimeError,
        "x must not be a view of a leaf tensor that requires grad",
    ),
    "one_of_several_views": (
        lambda: ops.fake_quant_(leaf(torch.ones(2, 3)).exp().unbind()[0], scales(1)),
        RuntimeError,
        "x must not be one of several views returned by one op .* use fake_quant",
    ),
    "expanded": (
        lambda: ops.fake_quant_(torch.ones(4, 1).expand(4, 6), scales(1)),
        ValueError,
        r"x must not be expanded, .* got stride 0 in dimension 1 \(shape \[4, 6\]\); use fake_quant",
    ),
    "learned_scale": (
        lambda: ops.fake_quant_(torch.ones(3), leaf(scales(1))),
        NotImplementedError,
        "scale and zero_point must not require grad, .* use fake_quant",
    ),
    "learned_zero_point": (
        lambda: ops.fake_quant_(torch.ones(3), scales(1), leaf(zero_points(1))),
        NotImplementedError,
        "scale and zero_point must not require grad",
    ),
    "dtype": (lambda: ops.fake_quant_(torch.ones(3).int(), scales(1)), TypeError, "x must be float32, float64"),
    "range": (lambda: ops.fake_quant_(torch.ones(3), scales(1), None, 5, 5), ValueError, "qmin must be smaller"),
    "scales": (lambda: ops.fake_quant_(torch.ones(3), scales(2)), ValueError, "scale must have 1 element"),
}


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_error(call, error, sentence):
    with pytest.raises(error, match=f"fake_quant_: {sentence}"):
        call()


@pytest.mark.parametrize("of", [leaf, lambda t: leaf(t).mul(1).chunk(1)[0]], ids=["leaf", "one_of_several_views"])
def test_what_is_refused_is_left_as_it_was(of):
    x = of(torch.full((3,), 0.123))
    with pytest.raises(RuntimeError, match="fake_quant_"):
        ops.fake_quant_(x, scales(1))
    assert (x._version, x.tolist()) == (0, torch.full((3,), 0.123).tolist())


# ---- the rest of torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "0-d"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_opcheck(layout, differentiable):
    x = LAYOUTS[layout](floats(torch.float32))
    x = leaf(x).clone() if differentiable else x
    torch.library.opcheck(native.fake_quant_.default, (x, scales(1), None, -8, 7))


def step(x: Tensor, scale: Tensor) -> Tensor:
    h = torch.relu(x * 2) + 1
    return ops.fake_quant_(h, scale, axis=1, **GRID) * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compile(backend, layout):
    torch._dynamo.reset()
    x, s = leaf(LAYOUTS[layout](floats(torch.float32))), scales(6)
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for f in (compiled, step):
        got, wanted = f(x, s), step(x, s)
        assert_same(got, wanted)
        grad = floats(torch.float32, 7)(*x.shape)
        assert_same(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(wanted, x, grad)[0])


def test_compiled_input_changes_too():
    torch._dynamo.reset()
    x = floats(torch.float32)(4, 6)
    wanted = ops.fake_quant(x, scales(1))
    torch.compile(ops.fake_quant_, fullgraph=True, backend="aot_eager")(x, scales(1))
    assert_same(x, wanted)


def test_export():
    scale = scales(6)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return step(x, scale)

    x, other = floats(torch.float32)(2, 6, 9), floats(torch.float32, 3)(5, 6, 9)
    program = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for exported in (program, program.run_decompositions()):
        assert_same(exported.module()(other), step(other, scale))


def test_meta():
    x = torch.empty(4, 6, device="meta")
    mask = native.fake_quant_(x, torch.ones(1, device="meta"), None, -8, 7, mask=True)
    assert (mask.shape, mask.dtype, mask.device.type) == ((3,), torch.uint8, "meta")
