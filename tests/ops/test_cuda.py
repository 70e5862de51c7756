"""CUDA against the CPU: values, masks, codes and dx bit for bit; sums within the bound of their roundings; no waiting."""

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    BLOCKS,
    CODES,
    FLOATS,
    RUNS,
    SIZES,
    SPECIAL,
    Channels,
    assert_laid_out_as,
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
from tests.ops import test_attention as attention
from tests.ops.test_batch_norm import ACTIVATIONS, tensors
from tests.ops.test_cuda_host_fused import WEIGHTS, cases, normalized
from tests.ops.test_every import image, run, sample
from tests.ops.test_fuzz import EVERY, OURS
from tests.ops.test_gradients import assert_sum
from tests.ops.test_max_pool import WINDOWS, values

OF_CPU = ("fused_attention", "fused_attention_backward")  # torch's kernels, which it has for the CPU
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

native = torch.ops.qtoolkit
GB = 2**30


def on_gpu(t: Tensor | None) -> Tensor | None:
    """A copy in the same memory order: expanded and stepped tensors stay so."""
    if t is None:
        return None
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


def both(f, *tensors: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    found = f(*(on_gpu(t) for t in tensors)), f(*tensors)
    return tuple([r] if isinstance(r, Tensor) else list(r) for r in found)


def check(f, *tensors: Tensor | None) -> None:
    for gpu, cpu in zip(*both(f, *tensors), strict=True):
        assert gpu.is_cuda
        assert_same(gpu, cpu)
        assert_laid_out_as(gpu, cpu)


def check_everything(x: Tensor, channels: Channels) -> None:
    count, how = channels.count(x), tuple(channels.named.values())
    s, z, grad = scales(count), zero_points(count), floats(x.dtype, 7)(*x.shape)
    for zero_point in (None, z):
        check(lambda x, s, z: native.fake_quant(x, s, z, -100, 90, *how, 1.0, True), x, s, zero_point)
    for format in ("e4m3", "e5m2", "e2m1", "nnie"):
        check(lambda x, s, f=format: native.fake_quant_float(x, s, f, *how, True), x, s)
    for op in (native.tensor_quant, native.fake_tensor_quant):
        check(lambda x, a, op=op: op(x, a, 8, False, True, True), x, torch.tensor(5.3))
    for code in CODES:
        check(lambda x, s, z, c=code: ops.quantize(x, s, z, *bounds(c), *how, dtype=c), x, s, z)
    for signed, ends in ((True, (-8, 7)), (False, (0, 15))):
        check(lambda x, s, z, e=ends: ops.quantize_int4(x, s * 9, z, *e, *how), x, s, z)
        packed = ops.quantize_int4(x, s * 9, z, *ends, *how)
        check(lambda p, s, z, g=signed: ops.dequantize_int4(p, x.shape, s, z, g, *how, dtype=x.dtype), packed, s, z)
    if x.numel() > 0:
        check(lambda x: ops.minmax(x, *how), x)
    check_sums(grad, x, s, z, channels)


def check_sums(grad: Tensor, x: Tensor, s: Tensor, z: Tensor, channels: Channels) -> None:
    """No more roundings in float32 than on the CPU, in another fixed order: the same bound, and the same bits twice."""
    wanted = reference.Gradients(grad, x, s, z, -100, 90, **channels.named)
    arguments = tuple(channels.named.values())
    runs = [native.fake_quant_learned_backward(*map(on_gpu, (grad, x, s, z)), -100, 90, *arguments) for _ in range(2)]
    for again, first in zip(*runs, strict=True):
        assert_same(again, first)
    dx, ds, dz = (t.cpu() for t in runs[0])
    assert_same(dx, wanted.dx)
    assert_sum(ds, s, wanted.ds, wanted.ds_mass, x)
    assert_sum(dz, z, wanted.dz, wanted.dz_mass, x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_every_layout(layout, channels, dtype):
    check_everything(layout(floats(dtype)), channels)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("group", [1, "batch"])
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run, group, dtype):
    check_everything(floats(dtype)(*run), Channels(1, run[0] if group == "batch" else 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("memory", ["row_major", "permuted"])
@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_blocks(block, memory, dtype):
    check_everything(*input_in_blocks(block, memory, dtype))


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    check_everything(floats(torch.float32)(size), Channels())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_backward(layout, channels, dtype):
    def gradient(x: Tensor, s: Tensor, grad: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(ops.fake_quant(x, s, qmin=-100, qmax=90, **channels.named), x, grad)[0]

    x = layout(floats(dtype))
    check(gradient, x, scales(channels.count(x)), floats(dtype, 7)(*x.shape))
    check(gradient, x, scales(channels.count(x)), floats(dtype, 7)(1)[0].expand(x.shape))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0, 1e-45, 1e-40, 1e-30, 1e30, torch.inf, torch.nan])
def test_special_values(dtype, scale):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(6)
    check(lambda x, s: native.fake_quant(x, s, None, -128, 127, mask=True), x, torch.tensor(scale))
    check(ops.quantize, x, torch.tensor(scale))
    check(ops.minmax, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("scale", [0.1, 2**-7, 3e-8, 700.0])
def test_every_sixteen_bit_float(dtype, scale):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    check(lambda x, s: native.fake_quant(x, s, None, -128, 127, mask=True), x, torch.tensor(scale))


@pytest.mark.parametrize("code", CODES, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dequantize(code, dtype):
    check(
        lambda q, s, z: ops.dequantize(q, s, z, axis=1, dtype=dtype),
        codes(code)(4, 70, 65),
        scales(70),
        zero_points(70),
    )


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("channels", [Channels(), Channels(1), Channels(1, 2)], ids=str)
def test_observer(momentum, channels):
    ranges = [
        [torch.full((channels.count(torch.empty(4, 6, 1)),), v) for v in (torch.inf, -torch.inf)] for _ in range(2)
    ]
    theirs = [t.cuda() for t in ranges[1]]
    for seed in range(3):
        x = floats(torch.float32, seed)(4, 6, 999)
        ops.observe_minmax_(x, *ranges[0], momentum, **channels.named)
        ops.observe_minmax_(x.cuda(), *theirs, momentum, **channels.named)
    for gpu, cpu in zip(theirs, ranges[0], strict=True):
        assert_same(gpu, cpu)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("channels", [Channels(), Channels(1), Channels(1, 2)], ids=str)
def test_observe_fake_quant(momentum, channels, symmetric):
    starts = (torch.inf, -torch.inf, torch.nan) if symmetric else (torch.inf, -torch.inf, torch.nan, 0.0)
    mine = [torch.full((channels.count(torch.empty(4, 6, 1)),), v) for v in starts]
    theirs = [t.cuda() for t in mine]
    for seed in range(3):
        x = floats(torch.float32, seed)(4, 6, 999)
        how = {"qmin": -8, "qmax": 7, "momentum": momentum, "pow2_scale": seed == 1, **channels.named}
        assert_same(ops.observe_fake_quant(x.cuda(), *theirs, **how), ops.observe_fake_quant(x, *mine, **how))
        for gpu, cpu in zip(theirs, mine, strict=True):
            assert_same(gpu, cpu)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_in_place(layout, channels, dtype):
    x = layout(floats(dtype))
    if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
        pytest.skip("expanded: an error")
    if x.untyped_storage().nbytes() < x.numel() * x.element_size():
        pytest.skip("overlapping: the last write of an element counts, in any order")
    s, z = scales(channels.count(x)), zero_points(channels.count(x))
    y = ops.fake_quant(x, s, z, -100, 90, **channels.named)
    assert_same(ops.fake_quant_(on_gpu(x), s.cuda(), z.cuda(), -100, 90, **channels.named), y)


# search_range does: it is the end of a calibration, on the CPU.
@pytest.mark.parametrize("op", [op for op in OURS if op not in ("search_range", *OF_CPU)])
def test_nothing_waits_for_the_device(op):
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in sample(op, image()).items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_gradient_waits_for_the_device():
    x, s, z = (t.cuda().requires_grad_() for t in (floats(torch.float32)(4, 6, 999), scales(6), zero_points(6)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.fake_quant(x, s, z, axis=1).sum().backward()
        ops.fake_quant(x, s.detach(), z.detach(), axis=1).sum().backward()
        ops.fake_quant_float(x, s.detach(), "e4m3", axis=1).sum().backward()
        ops.fake_tensor_quant(x, s.detach()[0]).sum().backward()
        ops.fake_quant_(x * 1, s.detach(), axis=1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", [op for op in OURS if op not in OF_CPU])
def test_every_op_on_a_device_that_is_not_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = sample(op, image())
    there = run(op, {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in given.items()})
    assert torch.cuda.current_device() == 0
    for got, want in zip(
        there, run(op, {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}), strict=True
    ):
        assert got.device == torch.device("cuda:1")
        assert_same(got, want)


def test_side_stream():
    """Work goes to the current stream: it sees what that stream wrote before, however late."""
    x, s = floats(torch.float32)(1000), scales(1)
    late, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    source, scale = x.cuda(), s.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        y, (lo, hi) = ops.fake_quant(late, scale), ops.minmax(late)
    stream.synchronize()
    assert_same(y, ops.fake_quant(x, s))
    assert (lo.item(), hi.item()) == (x.min().item(), x.max().item())


def test_cuda_graph():
    x, s = torch.zeros(4, 6, 50, device="cuda"), scales(6).cuda()
    ops.fake_quant(x, s, axis=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fake_quant(x, s, axis=1)
    x.copy_(floats(torch.float32)(4, 6, 50))
    graph.replay()
    assert_same(y, ops.fake_quant(x.cpu(), s.cpu(), axis=1))


def test_scale_on_another_device():
    with pytest.raises(ValueError, match="scale must be on the device of the input, cuda:0, got cpu"):
        ops.fake_quant(torch.ones(3, device="cuda"), torch.ones(1))


@pytest.mark.parametrize("channels", [Channels(), Channels(1)], ids=str)
def test_more_elements_than_an_int_counts(channels):
    shape = (2, 3, 2**29 // 2 * 3 // 2)  # 2.4e9 elements
    if torch.cuda.mem_get_info()[0] < 40 * GB:
        pytest.skip("less than 40 GiB of GPU memory is free")
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
    tail = floats(torch.bfloat16)(5000)
    with torch.no_grad():
        x[-1, -1, -5000:] = tail.cuda()
    s = scales(channels.count(x)).cuda()
    y = ops.fake_quant(x, s, qmin=-100, qmax=90, **channels.named)
    assert_same(y[-1, -1, -5000:], ops.fake_quant(tail, s[-1:].cpu(), qmin=-100, qmax=90))
    y.backward(torch.ones((), dtype=torch.bfloat16, device="cuda").expand(shape))
    wanted = reference.inside(tail, s[-1:].cpu(), None, -100, 90).bfloat16()
    assert_same(x.grad[-1, -1, -5000:], wanted)
    assert x.grad[0, 0, :5000].sum() == 5000
    hi = ops.minmax(x.detach(), **channels.named)[1].reshape(-1)
    assert hi[-1] == tail.max().item()


@pytest.mark.parametrize("bins", [2, 2048, 20000])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_histograms(dtype, bins):
    """Counts exactly, as the range grows, and the range that a search finds in them."""
    batches = [floats(dtype, seed)(*size) * 4**seed for seed, size in enumerate([(7,), (90, 1000), (3, 5), (1100003,)])]
    for parts in (
        batches,
        [b.abs() for b in batches],
        batches[::-1],
        [b[::3] for b in batches],
        [b[:0] for b in batches],
    ):
        both = [[torch.zeros(bins, dtype=torch.int64, device=d), *torch.zeros(2, device=d)] for d in ("cuda", "cpu")]
        for x in parts:
            ops.observe_histogram_(x.cuda() if x.is_contiguous() else on_gpu(x), *both[0])
            ops.observe_histogram_(x, *both[1])
            for gpu, cpu in zip(*both, strict=True):
                assert_same(gpu, cpu)
        for gpu, cpu in zip(*(ops.search_range(*h) for h in both), strict=True):
            assert gpu.is_cuda
            assert_same(gpu, cpu)


@pytest.mark.parametrize("bins", [64, 20000])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("axis", "group"), [(0, 1), (1, 1), (1, 2), (-1, 1)])
def test_histograms_of_channels(axis, group, dtype, bins):
    x = floats(dtype)(4, 6, 5, 700)
    for given in (x, x.to(memory_format=torch.channels_last), x[:, :, 1:], x.transpose(2, 3)):
        count = given.size(axis) * group
        both = [
            [torch.zeros(count, bins, dtype=torch.int64, device=d), *torch.zeros(2, count, device=d)]
            for d in ("cuda", "cpu")
        ]
        for part in (given.abs() / 100, given):
            ops.observe_histogram_(on_gpu(part), *both[0], axis, group)
            ops.observe_histogram_(part, *both[1], axis, group)
            for gpu, cpu in zip(*both, strict=True):
                assert_same(gpu, cpu)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**126])
def test_what_has_no_bin_breaks_a_histogram(bad):
    counts, lo, hi = torch.zeros(64, dtype=torch.int64, device="cuda"), *torch.zeros(2, device="cuda")
    ops.observe_histogram_(torch.ones(5, device="cuda"), counts, lo, hi)
    for x in (torch.tensor([1.0, bad], device="cuda"), torch.ones(9, device="cuda")):
        ops.observe_histogram_(x, counts, lo, hi)
        assert torch.stack([lo, hi]).isnan().all()
        assert counts.sum() == 5


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kind", [("e4m3", 32, "e8m0"), ("e2m1", 16, "e4m3"), ("e5m2", 48, "e8m0")])
def test_block_scales(kind, dtype):
    size, scale = kind[1], torch.tensor(0.037) if kind[2] == "e4m3" else None
    for x in (
        floats(dtype)(700, 2 * size),
        floats(dtype)(3, size, 5).transpose(1, 2),
        floats(dtype)(9, size + 1)[:, 1:],
    ):
        check(lambda x, s: native.fake_quant_block(x, *kind, s, True), x, scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_legacy_per_channel(dtype):
    x, amax = floats(dtype)(4, 6, 5, 7), torch.tensor([0.0, 2.0**-24, 1e-3, 1.0, 5.0, 9.0]).view(6, 1, 1)
    for given in (x, x.to(memory_format=torch.channels_last), x[:, :, 1:]):
        for grid in ((8, False, True), (4, False, False)):
            check(lambda x, a, g=grid: native.tensor_quant(x, a, *g, True)[::2], given, amax)
            check(lambda x, a, g=grid: native.fake_tensor_quant(x, a, *g, True), given, amax)


@pytest.mark.parametrize(("shape", "last"), cases(), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("residual", ["none", "values", "codes"])
@pytest.mark.parametrize("activation", ["none", "relu6", "leaky"])
def test_batch_norm(shape, last, dtype, residual, activation):
    """From the statistics that the GPU found, the bits of the oracle; the gradient of the residual with those of the CPU."""
    given = tensors(shape, dtype, last=last, residual=residual)
    low, high, slope = ACTIVATIONS[activation]
    names = ("x", "weight", "bias", "divisor", "residual", "residual_codes", "residual_scale", "residual_zero_point")
    head, grid = [given.get(name) for name in names], [given["scale"], given["zero_point"]]
    tail = (1e-3, low, high, slope)
    on = [on_gpu(t) for t in head], [on_gpu(t) for t in grid]
    y, codes_, mean, variance = native.batch_norm_fake_quant(*on[0], *tail, *on[1], -20, 30, 1.0)
    oracle = normalized(given, activation, mean.cpu(), variance.cpu())
    assert_same(y.cpu(), oracle.y())
    arithmetic = [t.to(mean.dtype).cpu() for t in grid]
    assert_same(codes_.cpu(), ops.quantize(oracle.value, *arithmetic, -20, 30))
    grad = torch.empty_like(given["x"]).copy_(floats(dtype, 3)(*shape))
    last_arguments = (-20, 30, 1.0, True, True)
    gpu = native.batch_norm_fake_quant_backward(on_gpu(grad), *on[0], mean, variance, *tail, *on[1], *last_arguments)
    statistics = mean.cpu(), variance.cpu()
    cpu = native.batch_norm_fake_quant_backward(grad, *head, *statistics, *tail, *grid, *last_arguments)
    assert_same(gpu[4].cpu(), cpu[4])
    for found, wanted in zip(gpu, cpu, strict=True):
        unit = 1e-10 if dtype == torch.float64 else max(torch.finfo(dtype).eps, 1e-4)
        bound = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(found.cpu(), wanted, rtol=4 * unit, atol=10 * unit * bound)


@pytest.mark.parametrize("kind", ["ties", "special", "lowest"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [(2, 3, 13, 14), (2, 16, 13, 17)], ids=str)
def test_max_pool(shape, window, last, dtype, kind):
    x = values(dtype, shape, kind)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    sides = [[s] if isinstance(s, int) else list(s) for s in WINDOWS[window]]
    check(lambda x: native.max_pool_offsets(x, *sides, False), x)
    y, places = native.max_pool_offsets(x, *sides, False)
    grad = torch.empty_like(y).copy_(floats(dtype, 3)(*y.shape))
    check(lambda g, o: native.max_pool_offsets_backward(g, o, list(shape), *sides, False), grad, places)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_weight(shape, folded, shared, dtype):
    weight, grad = floats(dtype)(*shape), floats(dtype, 3)(*shape)
    scale, factor = scales(1 if shared else shape[0]), scales(shape[0]) if folded else None
    grid = (-7, 7, None if shared else 0, 1, 0, 0.5)
    check(lambda w, f, s: native.quant_weight(w, f, s, None, *grid, False, 1), weight, factor, scale)
    call = lambda g, w, f, s: native.quant_weight_backward(g, w, f, s, None, *grid, False, 1, [True] * 3 + [False])  # noqa: E731
    for place, (gpu, cpu) in enumerate(zip(*both(call, grad, weight, factor, scale), strict=True)):
        if place == 0:
            assert_same(gpu, cpu)
        else:
            unit = 1e-10 if dtype == torch.float64 else 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
            torch.testing.assert_close(
                gpu.cpu(), cpu, rtol=unit, atol=unit * float(cpu.abs().max() if cpu.numel() else 0)
            )


@pytest.mark.parametrize("op", [op for op in EVERY if op not in OF_CPU])
def test_every_op_gives_what_the_cpu_gives(op):
    """On its sample, results and what it writes: near, since some sum in another order; codes and masks are equal.

    Behind torch's GELU and its softmax, whose last bits are the device's, a value may take the next code.
    """
    arguments = sample(op, floats(torch.float32)(4, 6, 16))
    on = {name: on_gpu(v) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    for gpu, cpu in zip(run(op, on), run(op, arguments), strict=True):
        if op in ("function_fake_quant", "attention_fake_quant"):
            far = (gpu.cpu().double() - cpu.double()).abs() > 1e-5 + 1e-4 * cpu.abs()
            assert far.sum() <= cpu.numel() // 100
        elif cpu.is_floating_point():
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert_same(gpu, cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 7, 197, 256, 500, 1024, 1025, 3000, 9000])
def test_attention_is_that_of_the_ops_one_by_one(length, masked, dtype):
    """On CUDA too: bit for bit where torch sums a softmax in the kernel's order, and products are exact in any order."""
    given = attention.operands(((2, 3), 9, length, 16, 8), torch.float32)
    mask = torch.linspace(-2, 2, 9 * length).mul(8).round().div(8).view(9, length).cuda() if masked else None
    grid = {"start": torch.tensor(2.0**-8).cuda(), "ratio": None, "rate": None, "zero_point": None}
    learned = {**grid, "ratio": attention.leaf(torch.ones((), device="cuda")), "rate": torch.ones((), device="cuda")}
    found = []
    for how in (attention.by_op, attention.one_by_one):
        values = {name: attention.leaf(value.cuda().to(dtype)) for name, value in given.items()}
        y = how(values, learned, mask, dtype)
        found.append((y, attention.gradients(y, values, learned)))
    (ours, gradients), (torchs, wanted) = found
    if length <= 1024:
        assert_same(ours, torchs)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for one, other in ((ours, torchs), *zip(gradients, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=unit, atol=unit * float(other.abs().max()))
