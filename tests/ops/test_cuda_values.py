"""CUDA's kernels against the CPU's, on a GPU and on the host (devices.py), in calls of ops: csrc/cuda/launch.cpp runs too.

Values, masks, codes and dx are compared bit for bit; sums with the bound of their roundings, or with the CPU's.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    BLOCKS,
    CHANNELS,
    CODES,
    FLOATS,
    LAYOUTS,
    RUNS,
    SIZES,
    SPECIAL,
    Channels,
    assert_same,
    bounds,
    codes,
    floats,
    input_in_blocks,
    layout_cases,
    name_of,
    scales,
    zero_points,
)
from tests.ops.devices import Device, Host, check, devices
from tests.ops.test_batch_norm import ACTIVATIONS, tensors
from tests.ops.test_cuda_host_fused import WEIGHTS, cases, normalized
from tests.ops.test_every import EAGER, run, sample
from tests.ops.test_gradients import assert_sum
from tests.ops.test_int4 import packed_in_memory
from tests.ops.test_max_pool import WINDOWS, values
from tests.ops.test_prelu import GRIDS, slopes
from tests.ops.test_shaped import KINDS, arguments

OF_CPU = ("fused_attention", "fused_attention_backward")  # torch's kernels, which it has for the CPU
native = torch.ops.qtoolkit


@pytest.fixture(autouse=True)
def _two_threads(threads):
    """One thread instead: the CPU's results are not what is tested."""
    threads(1)


def check_everything(device: Device, x: Tensor, channels: Channels) -> None:
    count, how = channels.count(x), tuple(channels.named.values())
    s, z, grad = scales(count), zero_points(count), floats(x.dtype, 7)(*x.shape)
    for zero_point in (None, z):
        check(device, lambda x, s, z: native.fake_quant(x, s, z, -100, 90, *how, 1.0, True), x, s, zero_point)
    for format in ("e4m3", "e5m2", "e2m1", "nnie"):
        check(device, lambda x, s, f=format: native.fake_quant_float(x, s, f, *how, True), x, s)
    for op in (native.tensor_quant, native.fake_tensor_quant):
        check(device, lambda x, a, op=op: op(x, a, 8, False, True, True), x, torch.tensor(5.3))
    for code in CODES:
        check(device, lambda x, s, z, c=code: ops.quantize(x, s, z, *bounds(c), *how, dtype=c), x, s, z)
    for signed, ends in ((True, (-8, 7)), (False, (0, 15))):
        check(device, lambda x, s, z, e=ends: ops.quantize_int4(x, s * 9, z, *e, *how), x, s, z)
        if channels.axis is None:
            grid = (None, None, None, *ends, 1.0, False, False, True)
            no = ("none", [], None, None, 0.0, False)
            check(device, lambda x, s, n=no, g=grid: native.function_fake_quant(x, *n, s * 9, *g)[:2], x, s)
            check(device, lambda x, s, e=ends: ops.quantize_int4(x, s * 9, None, *e, in_memory_order=True), x, s)
        packed = ops.quantize_int4(x, s * 9, z, *ends, *how)
        check(
            device,
            lambda p, s, z, g=signed: ops.dequantize_int4(p, x.shape, s, z, g, *how, dtype=x.dtype),
            packed,
            s,
            z,
        )
    if x.numel() > 0:
        check(device, lambda x: ops.minmax(x, *how), x)
    check_sums(device, grad, x, s, z, channels)


def check_sums(device: Device, grad: Tensor, x: Tensor, s: Tensor, z: Tensor, channels: Channels) -> None:
    """No more roundings in float32 than on the CPU, in another fixed order: the same bound, and the same bits twice."""
    wanted = reference.Gradients(grad, x, s, z, -100, 90, **channels.named)
    arguments = tuple(channels.named.values())

    def gradients(*given: Tensor) -> list[Tensor]:
        return [t for _ in range(2) for t in native.fake_quant_learned_backward(*given, -100, 90, *arguments)]

    found = device.results(gradients, grad, x, s, z)
    for again, first in zip(found[3:], found[:3], strict=True):
        assert_same(again, first)
    dx, ds, dz = found[:3]
    assert_same(dx, wanted.dx)
    assert_sum(ds, s, wanted.ds, wanted.ds_mass, x)
    assert_sum(dz, z, wanted.dz, wanted.dz_mass, x)


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_every_layout(device, layout, channels, dtype):
    check_everything(device, layout(floats(dtype)), channels)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("group", [1, "batch"])
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(device, run, group, dtype):
    check_everything(device, floats(dtype)(*run), Channels(1, run[0] if group == "batch" else 1))


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("memory", ["row_major", "permuted"])
@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_blocks(device, block, memory, dtype):
    check_everything(device, *input_in_blocks(block, memory, dtype))


@devices
@pytest.mark.parametrize("size", [*SIZES[:-1], pytest.param(SIZES[-1], marks=pytest.mark.sweep)])
def test_sizes(device, size):
    check_everything(device, floats(torch.float32)(size), Channels())


SHAPES = {  # around the tiles of reductions, and vectors of 8 elements
    "one": ((1,), Channels()),
    "per_tensor": ((20011,), Channels()),
    "one_row": ((1, 64), Channels(1)),
    "rows": ((37, 100), Channels(1)),
    "a_thread_a_channel": ((3, 300), Channels(1)),
    "columns": ((5, 1000), Channels(0)),
    "planes": ((4, 6, 7, 7), Channels(1)),
    "whole_vectors": ((4, 6, 64), Channels(1)),
    "slices": ((200, 3, 25), Channels(1)),
    "groups": ((6, 4, 9), Channels(1, 3)),
    "blocks": ((5, 96), Channels(1, 1, 32)),
    "blocks_of_columns": ((64, 10), Channels(0, 1, 16)),
}
VALUES = {
    "floats": lambda x: x,
    "negative_zeros": lambda x: torch.zeros_like(x).neg(),
    "both_zeros": lambda x: torch.zeros_like(x).copysign(x),
    "a_nan": lambda x: x.reshape(-1).index_fill(0, torch.tensor([x.numel() // 2]), math.nan).view_as(x),
    "infinities": lambda x: torch.full_like(x, math.inf).copysign(x),
}
MEMORY = {
    "dense": lambda x: x,
    "every_second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows_with_gaps": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_tiles_in_any_memory(device, shape, dtype, values, memory):
    sizes, channels = SHAPES[shape]
    x = MEMORY[memory](VALUES[values](floats(dtype)(*sizes)))
    if values in ("a_nan", "infinities"):
        grid = (scales(channels.count(x)), zero_points(channels.count(x)), -100, 90, *channels.named.values())
        check(device, lambda x, s, z: native.fake_quant(x, s, z, *grid[2:], 1.0, True), x, *grid[:2])
        check(device, lambda x, s, z: ops.quantize(x, s, z, *grid[2:]), x, *grid[:2])
        check(device, lambda x: ops.minmax(x, *grid[4:]), x)
    else:
        check_everything(device, x, channels)


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_that_are_exact_in_any_order(device, shape, dtype, memory):
    """So they have the bits of the CPU's."""
    sizes, channels = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    x = MEMORY[memory](torch.randint(-64, 64, sizes, generator=generator).to(dtype) / 8)
    grad, count = torch.randint(-4, 5, sizes, generator=generator).to(dtype), channels.count(x)
    grid = (torch.full((count,), 0.125), zero_points(count).clamp(-8, 8))
    how = (-16, 15, *channels.named.values(), 0.5)
    check(device, lambda *given: native.fake_quant_learned_backward(*given, *how), grad, x, *grid)


def every_number(dtype: torch.dtype, scale: float) -> Tensor:
    """All numbers of a 16-bit type; of float32, a sample, and those around the middles between two codes."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    middles = (torch.arange(-300, 300) + 0.5) * torch.tensor(scale)
    around = [middles.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    numbers = bits.to(torch.int32).view(torch.float32) * 1  # no NaN is signaling, as on a GPU
    return torch.cat([numbers, middles, *around])


@devices
@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 2.0**-60, 1e-3, 0.1, 0.5, 1 / 3, 1.7, 2.0**60, 1e30, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_division_is_exact(device, dtype, scale):
    """Whether by the divisor or, out of its range, by the scale: the values and masks are the CPU's."""
    zeros = torch.zeros(8, dtype=dtype)
    x = torch.cat([zeros, zeros.neg(), every_number(dtype, scale)])  # zeros need no look at other elements
    grid = torch.tensor([scale]), torch.tensor([-0.3])
    check(device, lambda x, s, z: native.fake_quant(x, s, z, -128, 127, mask=True), x, *grid)
    check(device, lambda x, s: native.fake_quant_float(x, s, "e4m3", mask=True), x, grid[0])


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_backward(device, layout, channels, dtype):
    def gradient(x: Tensor, s: Tensor, grad: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(ops.fake_quant(x, s, qmin=-100, qmax=90, **channels.named), x, grad)[0]

    x = layout(floats(dtype))
    check(device, gradient, x, scales(channels.count(x)), floats(dtype, 7)(*x.shape))
    check(device, gradient, x, scales(channels.count(x)), floats(dtype, 7)(1)[0].expand(x.shape))


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0, 1e-45, 1e-40, 1e-30, 1e30, torch.inf, torch.nan])
def test_special_values(device, dtype, scale):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(6)
    check(device, lambda x, s: native.fake_quant(x, s, None, -128, 127, mask=True), x, torch.tensor(scale))
    check(device, ops.quantize, x, torch.tensor(scale))
    check(device, ops.minmax, x)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("code", CODES, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dequantize(device, code, dtype):
    check(
        device,
        lambda q, s, z: ops.dequantize(q, s, z, axis=1, dtype=dtype),
        codes(code)(4, 70, 65),
        scales(70),
        zero_points(70),
    )


@devices
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("channels", [Channels(), Channels(1), Channels(1, 2)], ids=str)
def test_observer(device, momentum, channels):
    batches = [floats(torch.float32, seed)(4, 300, 9) for seed in range(3)]
    batches[1][0, 0, 5], batches[2][1, 7, 5] = math.nan, math.inf
    count = channels.count(batches[0])

    def observed(lo: Tensor, hi: Tensor, skipped: Tensor, *batches: Tensor) -> list[Tensor]:
        for x in batches:
            ops.observe_minmax_(x, lo, hi, momentum, **channels.named, skipped=skipped)
        grids = [ops.grid_of_range(lo, hi, -128, 127, symmetric=symmetric) for symmetric in (True, False)]
        return [lo, hi, skipped, *(t for grid in grids for t in grid if t is not None)]

    start = torch.full((count,), math.inf), torch.full((count,), -math.inf), torch.zeros(count, dtype=torch.int64)
    check(device, observed, *start, *batches)


@devices
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("channels", [1, 600])
def test_a_range_that_is_taken_in_the_first_steps(device, channels, symmetric):
    lo, hi = floats(torch.float32)(channels), floats(torch.float32, 1)(channels)

    def taken(lo: Tensor, hi: Tensor, scale: Tensor, zero_point: Tensor, count: Tensor, clock: Tensor) -> list[Tensor]:
        found = []
        for of_step in (1, 1, 2, 5, 6):
            grid = (scale, None if symmetric else zero_point)
            ops.take_range_(lo * of_step, hi * of_step, *grid, count, clock * of_step, -100, 90, steps=3)
            found += [scale.clone(), zero_point.clone(), count.clone()]
        return found

    start = torch.ones(channels), torch.zeros(channels), torch.tensor([0, 0]), torch.tensor(1)
    check(device, taken, lo, hi, *start)


@devices
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("channels", [Channels(), Channels(1), Channels(1, 2)], ids=str)
def test_observe_fake_quant(device, momentum, channels, symmetric):
    count, zeros = channels.count(torch.empty(4, 6, 1)), [] if symmetric else [0.0]
    how = {"qmin": -8, "qmax": 7, "momentum": momentum, **channels.named}

    def observed(*given: Tensor) -> list[Tensor]:
        batches, ranges = given[:3], given[3:]
        found = [ops.observe_fake_quant(x, *ranges, pow2_scale=seed == 1, **how) for seed, x in enumerate(batches)]
        return [*found, *ranges]

    starts = [torch.full((count,), v) for v in (math.inf, -math.inf, math.nan, *zeros)]
    check(device, observed, *(floats(torch.float32, seed)(4, 6, 999) for seed in range(3)), *starts)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_in_place(device, layout, channels, dtype):
    x = layout(floats(dtype))
    if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
        pytest.skip("expanded: an error")
    if x.untyped_storage().nbytes() < x.numel() * x.element_size():
        pytest.skip("overlapping: the last write of an element counts, in any order")
    s, z = scales(channels.count(x)), zero_points(channels.count(x))
    check(device, lambda x, s, z: ops.fake_quant_(x, s, z, -100, 90, **channels.named) * 1, x, s, z)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("bins", [2, 2048, 20000])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_histograms(device, dtype, bins):
    """Counts exactly, as the range grows, and the range that a search finds in them."""
    sizes = [(7,), (9, 1000), (3, 5), (11003 if isinstance(device, Host) else 1100003,)]
    batches = [floats(dtype, seed)(*size) * 4**seed for seed, size in enumerate(sizes)]
    for parts in (
        batches,
        [b.abs() for b in batches],
        batches[::-1],
        [b[::3] for b in batches],
        [b[:0] for b in batches],
    ):
        check(device, lambda *given: [*counted(*given), *ops.search_range(*given[:3])], *histogram(bins), *parts)


def histogram(bins: int, *channels: int) -> list[Tensor]:
    return [torch.zeros(*channels, bins, dtype=torch.int64), *torch.zeros(2, *channels)]


def counted(counts: Tensor, lo: Tensor, hi: Tensor, *batches: Tensor, of: tuple = ()) -> list[Tensor]:
    """A histogram after each batch."""
    found = []
    for x in batches:
        ops.observe_histogram_(x, counts, lo, hi, *of)
        found += [counts.clone(), lo.clone(), hi.clone()]
    return found


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("bins", [64, 20000])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("axis", "group"), [(0, 1), (1, 1), (1, 2), (-1, 1)])
def test_histograms_of_channels(device, axis, group, dtype, bins):
    x = floats(dtype)(4, 6, 5, 7 if isinstance(device, Host) else 700)
    for given in (x, x.to(memory_format=torch.channels_last), x[:, :, 1:], x.transpose(2, 3)):
        start = histogram(bins, given.size(axis) * group)
        check(device, lambda *each: counted(*each, of=(axis, group)), *start, given.abs() / 100, given)


@devices
@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**126])
def test_what_has_no_bin_breaks_a_histogram(device, bad):
    found = device.results(counted, *histogram(64), torch.ones(5), torch.tensor([1.0, bad]), torch.ones(9))
    for counts, lo, hi in (found[3:6], found[6:]):
        assert torch.stack([lo, hi]).isnan().all()
        assert counts.sum() == 5


@devices
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kind", [("e4m3", 32, "e8m0"), ("e2m1", 16, "e4m3"), ("e5m2", 48, "e8m0")])
def test_block_scales(device, kind, dtype):
    size, scale = kind[1], torch.tensor(0.037) if kind[2] == "e4m3" else None
    for x in (
        floats(dtype)(700, 2 * size),
        floats(dtype)(3, size, 5).transpose(1, 2),
        floats(dtype)(9, size + 1)[:, 1:],
    ):
        check(device, lambda x, s: native.fake_quant_block(x, *kind, s, True), x, scale)


@devices
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_legacy_per_channel(device, dtype):
    x, amax = floats(dtype)(4, 6, 5, 7), torch.tensor([0.0, 2.0**-24, 1e-3, 1.0, 5.0, 9.0]).view(6, 1, 1)
    for given in (x, x.to(memory_format=torch.channels_last), x[:, :, 1:]):
        for grid in ((8, False, True), (4, False, False)):
            check(device, lambda x, a, g=grid: native.tensor_quant(x, a, *g, True)[::2], given, amax)
            check(device, lambda x, a, g=grid: native.fake_tensor_quant(x, a, *g, True), given, amax)


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("shape", "last"), cases(), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("residual", ["none", "values", "codes"])
@pytest.mark.parametrize("activation", ["none", "relu6", "leaky"])
def test_batch_norm(device, shape, last, dtype, residual, activation):
    """From the statistics that the device found, the bits of the oracle; the residual's gradient with those of the CPU."""
    given = tensors(shape, dtype, last=last, residual=residual)
    names = ("x", "weight", "bias", "divisor", "residual", "residual_codes", "residual_scale", "residual_zero_point")
    head, grid = [given.get(name) for name in names], [given["scale"], given["zero_point"]]
    tail = (1e-3, list(ACTIVATIONS[activation]))
    grad = torch.empty_like(given["x"]).copy_(floats(dtype, 3)(*shape))

    def forward(qmin: int, qmax: int, packs: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        last = ([qmin, qmax], 1.0, None, None, packs)
        return lambda *given: native.batch_norm_fake_quant(*given[:-2], *tail, *given[-2:], *last)

    def backward(*given: Tensor) -> tuple[Tensor, ...]:
        of_norm = (*given[4:-2], *tail, *given[-2:], [-20, 30])
        return native.batch_norm_fake_quant_backward(*given[:4], [True] * 7, *of_norm)

    y, codes_, *statistics = device.results(forward(-20, 30), *head, *grid)
    oracle = normalized(given, activation, *statistics)
    assert_same(y, oracle.y())
    assert_same(codes_, ops.quantize(oracle.value, *(t.to(statistics[0].dtype) for t in grid), -20, 30))
    (_, codes_, *_), (_, packed, *_) = (device.results(forward(-8, 7, p), *head, *grid) for p in (False, True))
    if packed.numel():  # no planes share bytes
        assert_same(packed, packed_in_memory(codes_))
    of_backward = (grad, head[0], *statistics, *head[1:], *grid)
    found, cpu = device.results(backward, *of_backward), backward(*of_backward)
    assert_same(found[4], cpu[4])
    for got, wanted in zip(found, cpu, strict=True):
        assert_near(got, wanted, dtype)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums of terms that cancel out, added in another order."""
    unit = max(torch.finfo(wanted.dtype).eps, 1e-10 if dtype == torch.float64 else 1e-4)
    bound = float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=4 * unit, atol=10 * unit * bound, equal_nan=True)


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["ties", "special", "lowest"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [(2, 3, 13, 14), (2, 16, 13, 17)], ids=str)
def test_max_pool(device, shape, window, last, dtype, kind):
    x = values(dtype, shape, kind)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    sides = [[s] if isinstance(s, int) else list(s) for s in WINDOWS[window]]
    check(device, lambda x: native.max_pool_offsets(x, *sides, False), x)
    y, places = native.max_pool_offsets(x, *sides, False)
    grad = torch.empty_like(y).copy_(floats(dtype, 3)(*y.shape))
    check(device, lambda g, o: native.max_pool_offsets_backward(g, o, list(shape), *sides, False), grad, places)


@devices
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_weight(device, shape, folded, shared, dtype):
    weight, grad = floats(dtype)(*shape), floats(dtype, 3)(*shape)
    scale, factor = scales(1 if shared else shape[0]), scales(shape[0]) if folded else None
    grid = [-7, 7, 1, 0, *([] if shared else [0])]
    check(device, lambda w, f, s: native.quant_weight(w, f, s, None, grid, 0.5, None, False, 1), weight, factor, scale)

    def backward(*given: Tensor | None) -> tuple[Tensor, ...]:
        return native.quant_weight_backward(*given, None, grid, 0.5, None, False, 1, [True] * 3 + [False])

    found, wanted = device.results(backward, grad, weight, factor, scale), backward(grad, weight, factor, scale)
    assert_same(found[0], wanted[0])
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert_near(got, want, dtype)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prelu(device, layout, dtype, grid):
    x = LAYOUTS[layout](floats(dtype))
    grad, of_each = floats(dtype, 7)(*x.shape), x.dim() >= 2 and x.size(1) > 0
    for weight in (slopes(1), *([slopes(x.size(1), dtype)] if of_each else [])):
        given = (x, weight, scales(1), *GRIDS[grid])
        check(device, ops.prelu_fake_quant, *given)
        found, wanted = (f(native.prelu_fake_quant_backward, grad, *given) for f in (device.results, calling))
        assert_same(found[0], wanted[0])
        for got, want in zip(found[1:], wanted[1:], strict=True):
            assert_near(got, want, dtype)


def calling(f, *given):
    return f(*given)


@devices
@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shaped(device, layout, dtype, kind):
    x = LAYOUTS[layout](floats(dtype))
    grad = floats(dtype, 7)(*x.shape)
    for cut in (c for c in CHANNELS.values() if c.fit(x)):
        given = arguments(kind, x, cut)
        found, wanted = (f(shaped, grad, x, *given.values(), tuple(given)) for f in (device.results, calling))
        for got, want in zip(found[:2], wanted[:2], strict=True):
            assert_same(got, want)
        for got, want in zip(found[2:], wanted[2:], strict=True):
            assert_near(got, want, dtype)


def shaped(grad, x, *given):
    named = dict(zip(given[-1], given[:-1], strict=True))
    return native.fake_quant_shaped(x, **named), *native.fake_quant_shaped_backward(grad, x, **named)


@devices
@pytest.mark.parametrize("op", [op for op in EAGER if op not in OF_CPU])
def test_every_op_gives_what_the_cpu_gives(device, op):
    """On its sample, results and what it writes: near, since some sum in another order; codes and masks are equal.

    Behind torch's GELU and its softmax, whose last bits are the device's, a value may take the next code.
    """
    arguments = sample(op, floats(torch.float32)(4, 6, 16))
    found = device.results(lambda *given: run(op, dict(zip(arguments, given, strict=True))), *arguments.values())
    for got, want in zip(found, run(op, arguments), strict=True):
        if op in ("function_fake_quant", "attention_fake_quant"):
            far = (got.double() - want.double()).abs() > 1e-5 + 1e-4 * want.abs()
            assert far.sum() <= want.numel() // 100
        elif want.is_floating_point():
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert_same(got, want)
