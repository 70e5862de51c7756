"""max_pool against torch.nn.functional.max_pool2d: the same bits in values and gradients."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional

from qtoolkit import ops
from tests.cases import FLOATS, assert_laid_out_as, assert_same, floats, leaf, name_of

native = torch.ops.qtoolkit
WINDOWS = {  # kernel_size, stride, padding, dilation
    "2": (2, 2, 0, 1),
    "3s2p1": (3, 2, 1, 1),
    "overlapping": (3, 1, 1, 1),
    "5": (5, 1, 2, 1),
    "strided": (2, 3, 1, 1),
    "long": ((1, 4), (2, 3), (0, 2), 1),
    "tall": ((3, 2), (1, 2), (1, 0), (2, 1)),
    "dilated": (3, 2, 1, 2),
    "dilated_far": (2, 1, 1, 3),
    "whole": ((5, 9), 1, 0, 1),
    "one": (1, 1, 0, 1),
    "13": ((13, 13), 1, 6, 1),
}
SHAPES = {
    "image": (2, 3, 13, 14),
    "one_channel": (2, 1, 13, 17),
    "wide": (1, 2, 13, 150),
    "channels": (2, 70, 13, 9),
    "no_batch": (3, 13, 13),
}


def values(dtype: torch.dtype, shape: tuple, kind: str) -> Tensor:
    """Few different values, so that there are ties; or NaN and infinities among them, or nothing but -infinity."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if kind == "special":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.0], dtype=dtype)
        return special[torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(1))]
    return torch.full_like(x, -torch.inf) if kind == "lowest" else x


def both(x: Tensor, window: tuple, ceil_mode: bool) -> list[list[Tensor]]:
    found = []
    for f in (ops.max_pool, functional.max_pool2d):
        t = leaf(x)
        y = f(t, *window, ceil_mode)
        found.append([y, *torch.autograd.grad(y, t, floats(x.dtype, 3)(*y.shape))])
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["ties", "special", "lowest"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("ceil_mode", [False, True], ids=["floor", "ceil"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch(shape, window, last, ceil_mode, dtype, kind):
    x = values(dtype, SHAPES[shape], kind)
    if last:
        x = (
            x.contiguous(memory_format=torch.channels_last)
            if x.dim() == 4
            else x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        )
    got, wanted = both(x, WINDOWS[window], ceil_mode)
    for g, w in zip(got, wanted, strict=True):
        assert_same(g, w)
    if x.dim() == 4:
        assert_laid_out_as(got[0], wanted[0])


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_layouts_with_gaps(layout):
    x = floats(torch.float32)(4, 6, 20, 21)
    x = {"sliced": x[::2, 1::2, ::2, 3:], "transposed": x.transpose(1, 3), "expanded": x[:1].expand(3, 6, 20, 21)}[
        layout
    ]
    for g, w in zip(*both(x, WINDOWS["3s2p1"], False), strict=True):
        assert_same(g, w)


def test_windows_of_padding_alone():
    """torch gives -infinity; no element has their gradient."""
    x = torch.randn(1, 1, 2, 9)
    y = ops.max_pool(t := leaf(x), 2, 1, 1, 3)
    assert_same(y, functional.max_pool2d(x, 2, 1, 1, 3))
    y.masked_fill(y.isinf(), 0).sum().backward()
    assert t.grad.sum() == y.isfinite().sum()


def test_offsets_are_places_in_the_window():
    x = torch.tensor([[0.0, 5.0, 1.0, 2.0], [3.0, 4.0, 9.0, 9.0]]).view(1, 1, 2, 4)
    y, offsets = native.max_pool_offsets(x, [2], [2], [0], [1], False)
    assert offsets.dtype == torch.uint8
    assert (y.flatten().tolist(), offsets.flatten().tolist()) == ([5.0, 9.0], [1, 2])


@pytest.mark.parametrize("last", [False, True])
def test_threads_do_not_change_a_bit(last):
    x = torch.randn(3, 70, 40, 40)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found.append(both(x, WINDOWS["3s2p1"], False)[0])
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


def test_offsets_from_elsewhere_do_no_harm():
    """An offset outside of the window, or of x, has no gradient."""
    for last in (False, True):
        offsets = torch.randint(0, 256, (2, 70, 7, 7)).byte()
        offsets = offsets.contiguous(memory_format=torch.channels_last) if last else offsets
        dx = native.max_pool_offsets_backward(torch.ones(2, 70, 7, 7), offsets, [2, 70, 13, 13], [3], [2], [1], [1])
        assert 0 < dx.sum() < offsets.numel()


def test_what_backward_keeps():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ops.max_pool(leaf(torch.randn(2, 3, 8, 8)), 2)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.uint8, y.shape)]


REFUSED = {
    "kernel": ({"kernel_size": 17}, "kernel_size must have at most 256 elements, since an offset is one byte"),
    "zero": ({"kernel_size": 0}, r"kernel_size must lie in \[1, 2147483647\], got \[0\]"),
    "three": ({"kernel_size": [2, 2, 2]}, "kernel_size must have one or two numbers"),
    "stride": ({"kernel_size": 2, "stride": 0}, r"stride must lie in \[1"),
    "padding": ({"kernel_size": 2, "padding": 2}, "padding must be at most half of the kernel size"),
    "small": ({"kernel_size": 9}, "x must hold at least one window"),
    "matrix": ({"x": torch.ones(4, 4), "kernel_size": 2}, "x must have 3 or 4 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=f"^max_pool_offsets: {sentence}"):
        ops.max_pool(**{"x": torch.randn(1, 2, 5, 5)} | given)


def test_more_rows_than_float32_counts():
    x = torch.zeros(1, 1, 2**24 + 8, 1, dtype=torch.bfloat16)
    x[0, 0, -8:, 0] = torch.arange(8)
    assert_same(ops.max_pool(x.requires_grad_(), 1, 1)[0, 0, -8:, 0], torch.arange(8).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_a_dynamic_batch(backend):
    torch._dynamo.reset()
    compilations, counter = None, torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: ops.max_pool(x * 1, 3, 2, 1) * 2, fullgraph=True, dynamic=True, backend=counter)
    for batch in (2, 3, 5):
        x = floats(torch.float32, batch)(batch, 6, 9, 12)
        found = []
        for f in (compiled, lambda x: functional.max_pool2d(x, 3, 2, 1) * 2):
            y = f(t := leaf(x))
            found.append([y, *torch.autograd.grad(y.square().sum(), t)])
        for g, w in zip(*found, strict=True):
            assert_same(g, w)
        compilations = counter.frame_count if compilations is None else compilations
    assert counter.frame_count == compilations


@pytest.mark.parametrize("last", [False, True])
def test_opcheck(last):
    x = floats(torch.float32)(2, 6, 9, 12)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    window = ([3], [2], [1], [1], True)
    torch.library.opcheck(native.max_pool_offsets.default, (leaf(x), *window))
    y, offsets = native.max_pool_offsets(x, *window)
    torch.library.opcheck(
        native.max_pool_offsets_backward.default, (torch.randn_like(y), offsets, list(x.shape), *window)
    )


def test_double_backward_says_so():
    x = leaf(torch.randn(1, 2, 4, 4))
    (dx,) = torch.autograd.grad(ops.max_pool(x, 2).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^max_pool_offsets: double backward is not supported"):
        dx.sum().backward()
