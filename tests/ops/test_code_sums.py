"""Sums of codes as products of int8 matrices, on the CPU: the body that a GPU runs, against sums of int64.

tests/integer/test_sums_on_cuda.py runs the same cases on a GPU.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtoolkit.ops.layer import Geometry
from qtoolkit.ops.sums import has_int8_product

LINEAR = Geometry()
RANGES = {"signed": (torch.int8, -128, 127), "unsigned": (torch.uint8, 0, 255)}


def integers(codes: Tensor, zero_point: int, weight: Tensor, g: Geometry = LINEAR) -> Tensor:
    """The sums in int64, one place of the kernel after the other."""
    centred, weight = codes.cpu().long() - zero_point, weight.cpu().long()
    if not g.stride:
        return centred @ weight.t()
    lengths = codes.shape[2:]
    padded = centred.new_zeros(*codes.shape[:2], *(n + 2 * p for n, p in zip(lengths, g.padding, strict=True)))
    padded[(..., *(slice(p, p + n) for n, p in zip(lengths, g.padding, strict=True)))] = centred
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], g.dilation, strict=True)]
    out = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, g.stride, strict=True)]
    y = centred.new_zeros(codes.size(0), weight.size(0), *out)
    for place in itertools.product(*map(range, weight.shape[2:])):
        starts = [k * d for k, d in zip(place, g.dilation, strict=True)]
        ends = [a + s * (n - 1) + 1 for a, s, n in zip(starts, g.stride, out, strict=True)]
        read = padded[(..., *(slice(a, b, s) for a, b, s in zip(starts, ends, g.stride, strict=True)))]
        y += torch.einsum("nc...,oc->no...", read, weight[(..., *place)])
    return y


def code_sums(codes: Tensor, zero_point: float | None, weight: Tensor, g: Geometry, dtype: torch.dtype) -> Tensor:
    layer = torch.classes.qtoolkit.CodeSums(weight, list(g.stride), list(g.padding), list(g.dilation))
    offset = None if zero_point is None else torch.tensor([zero_point], device=codes.device)
    return layer.sums(codes, offset, dtype)


def assert_exact(codes: Tensor, zero_point: int | None, weight: Tensor, g: Geometry = LINEAR) -> None:
    wanted = integers(codes, zero_point or 0, weight, g)
    for dtype in (torch.float32, torch.float64):
        y = code_sums(codes, zero_point, weight, g, dtype)
        assert (y.dtype, y.device, y.shape) == (dtype, codes.device, wanted.shape)
        assert torch.equal(y.cpu(), wanted.to(dtype))
    if len(g.stride) == 2:
        assert y.is_contiguous(memory_format=torch.channels_last)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int, device: str) -> Tensor:
    return torch.randint(low, high + 1, shape, device=device).to(dtype)


def check_linear(device: str) -> None:
    """Every number of rows up to 40, depths and outputs that are no multiples of 8, more dimensions, an empty batch."""
    torch.manual_seed(0)
    sizes = [(rows, 24, 16) for rows in range(41)]
    sizes += [(20, depth, outputs) for depth in (*range(1, 34), 63, 65, 250) for outputs in (1, 3, 8, 9, 16)]
    for rows, depth, outputs in sizes:
        weight = drawn((outputs, depth), torch.int8, -128, 127, device)
        for dtype, low, high in RANGES.values():
            for zero_point in (None, 3):
                assert_exact(drawn((rows, depth), dtype, low, high, device), zero_point, weight)
    codes = drawn((4, 5, 6, 12), *RANGES["unsigned"], device)
    weight = drawn((7, 12), torch.int8, -128, 127, device)
    assert_exact(codes, 200, weight)
    assert_exact(codes.transpose(0, 2), 200, weight)
    assert_exact(codes[:, ::2, 1:], 200, weight)
    assert_exact(codes[:0], 200, weight)


def drawn_convolution(r: random.Random, device: str) -> tuple[Tensor, int | None, Tensor, Geometry]:
    dims = r.choice([1, 2, 2, 2, 3])
    kernel, stride, padding, dilation = (
        tuple(r.choice(choice) for _ in range(dims)) for choice in ([1, 1, 2, 3, 5], [1, 2, 3], [0, 1, 2, 4], [1, 1, 2])
    )
    lengths = [(k - 1) * d + 1 + r.randrange(7) for k, d in zip(kernel, dilation, strict=True)]
    channels, outputs = r.choice([1, 3, 5, 8, 16, 24]), r.choice([1, 3, 8, 10, 16])
    dtype, low, high = r.choice([*RANGES.values()])
    codes = drawn((r.choice([0, 1, 2, 5]), channels, *lengths), dtype, low, high, device)
    if r.random() < 0.6:
        codes = codes.movedim(1, -1).contiguous().movedim(-1, 1)
    elif r.random() < 0.3:
        codes = torch.cat([codes, codes], -1)[..., : lengths[-1]]
    weight = drawn((outputs, channels, *kernel), torch.int8, -128, 127, device)
    if r.random() < 0.5:
        weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
    zero_point = r.choice([None, low, high, r.randint(low, high)])
    return codes, zero_point, weight, Geometry(stride, padding, dilation)


def check_convolutions(device: str, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        assert_exact(*drawn_convolution(random.Random(seed), device))


def check_pointwise(device: str) -> None:
    """Convolutions whose images are the rows, and such that cut rows out of them."""
    torch.manual_seed(0)
    for channels, outputs, stride, padding in itertools.product((8, 12, 64), (8, 20), (1, 2), (0, 1)):
        weight = drawn((outputs, channels, 1, 1), torch.int8, -128, 127, device)
        g = Geometry((stride, stride), (padding, padding), (1, 1))
        for name in RANGES:
            codes = drawn((3, channels, 7, 6), *RANGES[name], device)
            for memory_format in (torch.contiguous_format, torch.channels_last):
                assert_exact(codes.contiguous(memory_format=memory_format), 5, weight, g)
                assert_exact(codes.contiguous(memory_format=memory_format)[1:], 5, weight, g)


def check_largest(device: str) -> None:
    """Sums near the ends of int32, and those that float32 rounds: 131,071 products of 128 with 128."""
    depth = (2**31 - 1) // 128 // 128
    for dtype, low, high in RANGES.values():
        for code, value in itertools.product((low, high), (-128, 127)):
            codes = torch.full((2, depth), code, dtype=dtype, device=device)
            weight = torch.full((3, depth), value, dtype=torch.int8, device=device)
            weight[1, ::2], weight[2, 7] = 127, 1
            for zero_point in (None, low, high):
                assert_exact(codes, zero_point, weight)
        images = torch.full((1, depth // 9, 3, 3), high, dtype=dtype, device=device)
        weight = torch.full((1, depth // 9, 3, 3), -128, dtype=torch.int8, device=device)
        assert_exact(images, low, weight, Geometry((1, 1), (1, 1), (1, 1)))


def check_zero_point_outside_the_codes(device: str) -> None:
    """Grids whose zero point is trained may have one; padding is no code, and adds nothing."""
    torch.manual_seed(0)
    weight = drawn((5, 3, 3, 3), torch.int8, -128, 127, device)
    for name in RANGES:
        codes = drawn((2, 3, 6, 6), *RANGES[name], device)
        for zero_point in (-100_000, 300):
            assert_exact(codes, zero_point, weight, Geometry((1, 1), (1, 2), (1, 1)))
        y = code_sums(codes, float("nan"), weight, Geometry((1, 1), (0, 0), (1, 1)), torch.float32)
        assert y.isnan().all()


def check_chunks(device: str) -> None:
    """Rows that take more than the scratch memory, 2^28 bytes, are computed an image after the other."""
    torch.manual_seed(0)
    codes = drawn((3, 1, 420, 420), torch.uint8, 0, 15, device)
    weight = drawn((1, 1, 30, 30), torch.int8, -4, 3, device)
    g = Geometry((1, 1), (0, 0), (1, 1))
    y = code_sums(codes, 3, weight, g, torch.float64)
    for image, sums in zip(codes, y, strict=True):
        assert torch.equal(code_sums(image[None], 3, weight, g, torch.float64)[0], sums)
    corner = codes[:, 0, -30:, -30:].long() - 3
    assert torch.equal(y[:, 0, -1, -1].long(), (corner * weight[0, 0]).sum((1, 2)))


CHECKS = (check_linear, check_pointwise, check_largest, check_zero_point_outside_the_codes, check_chunks)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check) -> None:
    assert has_int8_product(torch.device("cpu"))
    check("cpu")


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**31))
def test_convolutions_on_the_cpu(seed: int) -> None:
    check_convolutions("cpu", range(seed, seed + 1))


def test_a_gpu_is_given_operands_that_its_kernels_take() -> None:
    """More than 16 rows, depths and outputs in multiples of 8: what torch checks on CUDA."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for rows, depth, outputs in itertools.product((1, 16, 17, 33), (1, 8, 9, 27), (1, 8, 10)):
            code_sums(torch.ones(rows, depth).byte(), 3, torch.ones(outputs, depth).char(), LINEAR, torch.float32)
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::_int_mm"]
    assert len(shapes) == 48
    for left, right in shapes:
        assert left[0] > 16
        assert [left[1] % 8, right[1] % 8] == [0, 0]
        assert left[1] == right[0]
