"""Every instruction set computes the same bits. Each runs in a process of its own: the library chooses at its first op."""

import functools
import hashlib
import itertools
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import processes
from tests.cases import (
    BLOCKS,
    CHANNELS,
    CODES,
    FLOATS,
    LAYOUTS,
    RUNS,
    SPECIAL,
    Channels,
    bounds,
    codes,
    floats,
    leaf,
    scales,
    zero_points,
)
from tests.ops.test_batch_norm import ACTIVATIONS, DIFFERENTIABLE, LAST, SHAPES, fused, tensors
from tests.ops.test_max_pool import SHAPES as POOLED
from tests.ops.test_max_pool import WINDOWS
from tests.ops.test_max_pool import values as pooled

RESIDUALS = ("none", "values", "codes")

NAMES = ("avx512", "avx2", "plain")
TELL = "import torch, qtoolkit; print(torch.ops.qtoolkit.instruction_set())"
native = torch.ops.qtoolkit


def computed_on(x: Tensor, channels: Channels, grad: Tensor) -> Iterator[Tensor]:
    """Every op, with and without a zero point."""
    how, count = tuple(channels.named.values()), channels.count(x)
    for z in (None, zero_points(count)):
        y, mask = native.fake_quant(x, scales(count), z, -100, 90, *how, 1.0, True)
        yield from (y, mask, native.fake_quant_backward(grad, mask, [] if y.is_contiguous() else order_of(y)))
        yield from native.fake_quant_learned_backward(grad, x, scales(count), z, -100, 90, *how)
        for k in (None, scales(count) + 1):
            soft = (scales(count), z, k, -100, 90, "clip", [], *how)
            yield from (native.fake_quant_shaped(x, *soft), *native.fake_quant_shaped_backward(grad, x, *soft))
    if channels.axis in (None, 1) and channels.group == 1 and not channels.block_size and count > 0:
        for behind in (None, zero_points(1)):
            rectified = (scales(count) * 4 - 0.5, scales(1), behind, -100, 90)
            yield native.prelu_fake_quant(x, *rectified)
            yield from native.prelu_fake_quant_backward(grad, x, *rectified)
    for low in (0, -1):
        for shaped in (
            (scales(count), None, None, 40 * low, 40, "levels", [0, 1, 3, 17, 40], *how),
            (scales(count) * 9, scales(count) * 10, None, low, 1, "interval", [], *how),
        ):
            yield from (native.fake_quant_shaped(x, *shaped), *native.fake_quant_shaped_backward(grad, x, *shaped))
    for format in ("e4m3", "e5m2", "e2m1", "nnie"):
        yield from native.fake_quant_float(x, scales(count), format, *how, True)
    if x.dim() > 0 and x.numel() > 0 and channels.axis is None:
        wide = x.repeat_interleave(48, -1)
        yield from native.fake_quant_block(wide, "e4m3", 16, "e8m0", None, True)
        yield from native.fake_quant_block(wide, "e2m1", 48, "e4m3", torch.tensor(0.01), True)
    amax = torch.tensor(5.3)
    if channels.group == 1 and channels.axis is not None and not channels.block_size and count > 0:
        sizes = [count if d == channels.axis % x.dim() else 1 for d in range(x.dim())]
        amax = (scales(count) * 40 - 2.5).relu().reshape(sizes)  # some are zero
    for grid in ((8, False, True), (4, True, True), (8, False, False)):
        yield from native.tensor_quant(x, amax, *grid, True)
        yield from native.fake_tensor_quant(x, amax, *grid, True)
    yield from native.scaled_e4m3(x, amax, True)
    if channels.axis is None:
        yield from native.fake_affine_tensor_quant(x, torch.tensor(-2.3), torch.tensor(4.1), 8, True)
        yield from runtimes_on(x, grad)
    for code in CODES:
        yield (q := ops.quantize(x, scales(count), z, *bounds(code), *how, dtype=code))
        yield ops.dequantize(q, scales(count), z, *how, dtype=x.dtype)
    for signed, ends in ((True, (-8, 7)), (False, (0, 15))):
        yield (packed := ops.quantize_int4(x, scales(count) * 9, z, *ends, *how))
        yield ops.dequantize_int4(packed, x.shape, scales(count), z, signed, *how, dtype=x.dtype)
        if channels.axis is None:
            grid = (scales(1) * 9, None, None, z, *ends, 1.0, False, False, True)
            yield from native.function_fake_quant(x, "none", [], None, None, 0.0, False, *grid)[:2]
    if x.numel() > 0:
        yield from ops.minmax(x, *how)
    for values in (x, x.abs()):
        running = torch.zeros(300, dtype=torch.int64), torch.zeros(()), torch.zeros(())
        ops.observe_histogram_(values, *running)
        yield from running


def runtimes_on(x: Tensor, other: Tensor) -> Iterator[Tensor]:
    """The arithmetic of runtimes."""
    one = scales(1)
    for factor, joined in ((torch.tensor(0.37), False), (torch.tensor(0.37), True), (None, False)):
        yield native.requantize(x, factor, one, -100, 90, torch.tensor([7.3]), 3, joined)
    yield native.fake_quant_by_factor(x, one, zero_points(1), -100, 90)
    yield native.centred_codes(x, one)
    finite = x.nan_to_num(0.0, 60.0, -60.0).clamp(-60, 60)
    for kernel in ((False,), (True,), (False, True), (False, True, True)):
        yield native.add_codes(finite, one, 3, other, one * 2, -5, one * 3, 1, -100, 90, *kernel)
    for count in (1, 3, 49):
        for once in (False, True):
            sums, factor = (finite * 1e4).round(), torch.tensor(0.0037)
            yield native.requantize_fixed_point(sums, factor, one, -100, 90, count, once)


def fused_batch_norms(dtype: torch.dtype, first: int, step: int) -> Iterator[Tensor]:
    """Statistics, values, codes, every gradient and running statistics of each chain on each shape, or of some of them."""
    cases = [*itertools.product(shapes_of_norms(), ACTIVATIONS, RESIDUALS)]
    for (shape, last), activation, residual in cases[first::step]:
        for quantized in (False, True):
            torch.manual_seed(0)
            given = tensors(shape, dtype, last=last, residual=residual, quantized=quantized)
            given = {name: leaf(t) if name in DIFFERENTIABLE else t for name, t in given.items()}
            y, codes, mean, variance = fused(activation, **given)
            yield from (y.detach(), codes, mean, variance)
            if quantized:
                yield fused(activation, **given | {"qmin": -8, "qmax": 7}, packs_codes=True)[1]
            inputs = [given[name] for name in DIFFERENTIABLE if name in given]
            yield from torch.autograd.grad(y, inputs, floats(dtype, 7)(*shape))
            running = torch.zeros_like(mean, dtype=dtype), torch.ones_like(mean, dtype=dtype)
            ops.batch_norm_track_(
                *running, mean, variance, 0.3, y.numel() // y.size(1), divisor=given["divisor"].detach()
            )
            yield from running


def shapes_of_norms() -> list[tuple[tuple[int, ...], bool]]:
    return [(shape, last) for shape in SHAPES.values() for last in (False, True) if not last or len(shape) in LAST]


def max_pools(dtype: torch.dtype, first: int, step: int) -> Iterator[Tensor]:
    """Values, places and gradients of each window on each shape, or of some of them."""
    cases = [*itertools.product(WINDOWS.values(), POOLED.values(), (False, True))]
    for window, shape, ceil_mode in cases[first::step]:
        for kind, last in itertools.product(("ties", "special"), (False, True)):
            x = pooled(dtype, shape, kind).nan_to_num(1.0, torch.inf, -torch.inf)
            x = x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x
            sides = [side if isinstance(side, tuple) else (side,) for side in window]
            y, places = native.max_pool_offsets(x, *sides, ceil_mode)
            yield from (y, places)
            yield native.max_pool_offsets_backward(floats(dtype, 7)(*y.shape), places, x.shape, *sides, ceil_mode)


def order_of(y: Tensor) -> list[int]:
    return sorted(range(y.dim()), key=lambda d: -y.stride(d))


def special(dtype: torch.dtype) -> Tensor:
    """No NaN: which of two NaN goes on is the processor's affair."""
    values = torch.tensor(SPECIAL[1:], dtype=torch.float64).to(dtype)
    return values[torch.randint(0, len(values), (3, 7, 130), generator=torch.Generator().manual_seed(0))]


@functools.cache
def sources(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Inputs and gradients."""
    inputs = [layout(floats(dtype)) for layout in LAYOUTS.values()]
    inputs += [floats(dtype)(*run) for run in RUNS]
    inputs += [floats(dtype)(*sizes) for sizes, _, _ in BLOCKS]
    inputs += [special(dtype)]
    if dtype.itemsize == 2:
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        inputs += [every.nan_to_num(1.0, torch.inf, -torch.inf).view(256, 256)]
    return [(x, floats(dtype, 7)(*x.shape)) for x in inputs]


def digests(step: int) -> Iterator[str]:
    """One line for each dtype and way to see channels; all results go in, on all sources for a step of 1.

    For a larger one, on some of them, others for each dtype: for a step of 3, every source is seen in every way in one of them.
    """
    for place, dtype in enumerate(FLOATS):
        for way, (name, channels) in enumerate(CHANNELS.items()):
            total = hashlib.sha256()
            for x, grad in sources(dtype)[(place + way) % step :: step]:
                for result in computed_on(x, channels, grad) if channels.fit(x) else ():
                    total.update(result.contiguous().flatten().view(torch.uint8).numpy())
            yield f"{dtype} {name} {total.hexdigest()}"
        for several in (fused_batch_norms, max_pools):
            total = hashlib.sha256()
            for result in several(dtype, place % step, step):
                total.update(result.contiguous().flatten().view(torch.uint8).numpy())
            yield f"{dtype} {several.__name__} {total.hexdigest()}"
    yield f"codes {hashlib.sha256(ops.dequantize(codes(torch.int32)(100003), scales(1)).numpy()).hexdigest()}"


@functools.cache
def with_instruction_set(name: str, program: str) -> subprocess.CompletedProcess:
    return processes.python("-c", program, env=os.environ | {"QTOOLKIT_CPU": name})


@functools.cache
def lines_of(name: str, step: int) -> list[str]:
    """What this processor computes with an instruction set, or a skip where it has none such."""
    told = with_instruction_set(name, TELL)
    if told.returncode != 0 and "must name an instruction set of this processor" in told.stderr:
        pytest.skip(f"this processor has no {name}")
    assert told.stdout.strip() == name
    program = f"from tests.ops import test_instruction_sets as t; print(*t.digests({step}), sep='\\n')"
    ran = with_instruction_set(name, program)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(3, marks=pytest.mark.slow), 50]
)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "plain"])
def test_the_same_bits_as_plain(name, step):
    mine, plain = lines_of(name, step), lines_of("plain", step)
    assert len(plain) == len(FLOATS) * (len(CHANNELS) + 2) + 1
    assert mine == plain


def test_minmax_of_zeros_of_both_signs():
    """Which of them is given as the lowest does not depend on a vector's width."""
    program = (
        "import torch; from qtoolkit import ops;"
        "x = torch.full((1024,), 5.0); x[2] = -0.0; x[9] = 0.0;"
        "print(*(t.item() for y in (x, -x) for t in ops.minmax(y)))"
    )
    known = [told for n in NAMES if (told := with_instruction_set(n, program)).returncode == 0]
    assert known
    assert len({told.stdout for told in known}) == 1, [told.stdout for told in known]


def test_the_widest_is_the_default():
    has = [n for n in NAMES if with_instruction_set(n, TELL).returncode == 0]
    assert with_instruction_set("", TELL).stdout.strip() == has[0]


@pytest.mark.parametrize(
    "program", ["torch.ops.qtoolkit.instruction_set()", "ops.fake_quant(torch.ones(3), torch.ones(1))"]
)
def test_unknown_name(program):
    ran = with_instruction_set("sse9", f"import torch; from qtoolkit import ops; {program}")
    assert ran.returncode == 1
    assert "ValueError: QTOOLKIT_CPU must name an instruction set of this processor (" in ran.stderr
    assert "plain), got 'sse9'; unset it to use the widest." in ran.stderr
