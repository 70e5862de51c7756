"""CUDA kernels executed on the CPU (see cuda_host), in three orders of their threads, against the CPU's kernels."""

import ctypes

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests.cases import assert_same, floats, name_of, scales, zero_points
from tests.ops import cuda_host
from tests.ops.cuda_host import FLOATS, FORMATS, ORDERS, channels, compiled, dtype_number, operand, pointers

native = torch.ops.qtoolkit
SHAPES = {  # shape, axis, group, block
    "one": ((1,), None, 1, 0),
    "per_tensor": ((20011,), None, 1, 0),
    "one_row": ((1, 64), 1, 1, 0),
    "rows": ((37, 100), 1, 1, 0),
    "a_thread_a_channel": ((3, 300), 1, 1, 0),
    "columns": ((5, 1000), 0, 1, 0),
    "planes": ((4, 6, 49), 1, 1, 0),
    "whole_vectors": ((4, 6, 64), 1, 1, 0),
    "slices": ((200, 3, 25), 1, 1, 0),
    "groups": ((6, 4, 9), 1, 3, 0),
    "blocks": ((5, 96), 1, 1, 32),
    "blocks_of_columns": ((64, 10), 0, 1, 16),
}
VALUES = {
    "floats": lambda x: x,
    "negative_zeros": lambda x: torch.zeros_like(x).neg(),
    "both_zeros": lambda x: torch.zeros_like(x).copysign(x),
    "a_nan": lambda x: x.reshape(-1).index_fill(0, torch.tensor([x.numel() // 2]), torch.nan).view_as(x),
    "infinities": lambda x: torch.full_like(x, torch.inf).copysign(x),
}
STRIDED = {  # inputs whose results are row-major
    "dense": lambda x: x,
    "every_second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows_with_gaps": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
shapes = pytest.mark.parametrize("shape", SHAPES)
strided = pytest.mark.parametrize("layout", STRIDED)


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return compiled()


@pytest.fixture
def run(kernels):
    return lambda *args, **fields: cuda_host.run(kernels, *args, **fields)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def like(t: Tensor) -> Tensor:
    """Memory for a row-major result, which does not hold it already."""
    return torch.full(t.shape, 7, dtype=t.dtype)


def grid_of(shape: str, dtype: torch.dtype) -> list[Tensor]:
    """A scale and a zero point for each channel."""
    count = channels(*SHAPES[shape])[3]
    return [make(count).to(arithmetic(dtype)) for make in (scales, zero_points)]


def input_of(shape: str, dtype: torch.dtype, layout: str = "dense", seed: int = 0) -> Tensor:
    return STRIDED[layout](floats(dtype, seed)(*SHAPES[shape][0]))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("values", VALUES)
@dtypes
@shapes
def test_minmax(run, shape, dtype, values):
    x = VALUES[values](input_of(shape, dtype)).contiguous()
    wanted = [t.reshape(-1) for t in ops.minmax(x, *SHAPES[shape][1:])]
    for order in ORDERS:
        ranges = torch.full((2, wanted[0].numel()), torch.nan, dtype=torch.float64)
        sums = {"sum_scale": ranges[0], "sum_zero_point": ranges[1]}
        run("minmax", order, numel=x.numel(), channels=channels(*SHAPES[shape]), x=x, **sums)
        assert_same(ranges.to(dtype), torch.stack(wanted))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("values", VALUES)
@dtypes
@shapes
def test_fake_quant(run, shape, dtype, values):
    check_elementwise(run, shape, VALUES[values](input_of(shape, dtype)).contiguous())


@pytest.mark.sweep(2)
@strided
@dtypes
@shapes
def test_strided_inputs(run, shape, dtype, layout):
    check_elementwise(run, shape, input_of(shape, dtype, layout))


def check_elementwise(run, shape: str, x: Tensor) -> None:
    grid = grid_of(shape, x.dtype)
    wanted = native.fake_quant(x, *grid, -128, 127, *SHAPES[shape][1:], mask=True)
    assert wanted[0].is_contiguous()
    fields = {"numel": x.numel(), "channels": channels(*SHAPES[shape]), "x": x, "y_dtype": dtype_number(x)}
    codes = ops.quantize(x, *grid, -128, 127, *SHAPES[shape][1:])
    for order in ORDERS:
        got = [like(t) for t in (*wanted, codes)]
        results = {"y": got[0], "mask": got[1], "codes": got[2], "scale": grid[0], "zero_point": grid[1]}
        run("fake_quant", order, bounds=(-128, 127), **fields, **results)
        for g, w in zip(got, (*wanted, codes), strict=True):
            assert_same(g, w)


def every_number(dtype: torch.dtype, scale: float) -> Tensor:
    """All numbers of a 16-bit type; of float32, a sample, and those around the middles between two codes."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    middles = (torch.arange(-300, 300) + 0.5) * torch.tensor(scale)
    around = [middles.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    numbers = bits.to(torch.int32).view(torch.float32) * 1  # no NaN is signaling, as on a GPU
    return torch.cat([numbers, middles, *around])


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 2.0**-60, 1e-3, 0.1, 0.5, 1 / 3, 1.7, 2.0**60, 1e30, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_division_is_exact(run, dtype, scale):
    """Whether by the divisor or, out of its range, by the scale: the values and masks are the CPU's."""
    x, grid = every_number(dtype, scale), [torch.tensor([scale]), torch.tensor([-0.3])]
    zeros = torch.zeros(8, dtype=dtype)
    x = torch.cat([zeros, zeros.neg(), x])  # vectors of zeros, which need no look at other elements
    fields = {"numel": x.numel(), "channels": channels(x.shape), "x": x, "y_dtype": dtype_number(x), "scale": grid[0]}
    integer, small = (
        native.fake_quant(x, *grid, -128, 127, mask=True),
        native.fake_quant_float(x, grid[0], "e4m3", mask=True),
    )
    for kernel, wanted, options in (
        ("fake_quant", integer, {"bounds": (-128, 127), "zero_point": grid[1]}),
        ("fake_quant_float", small, {"format": FORMATS["e4m3"]}),
    ):
        got = [like(t) for t in wanted]
        run(kernel, "forwards", y=got[0], mask=got[1], **fields, **options)
        for g, w in zip(got, wanted, strict=True):
            assert_same(g, w)


@pytest.mark.sweep(2)
@strided
@dtypes
@pytest.mark.parametrize("shape", ["per_tensor", "rows", "planes", "blocks"])
def test_the_other_elementwise_kernels(run, shape, dtype, layout):
    x, (scale, _) = input_of(shape, dtype, layout), grid_of(shape, dtype)
    of = SHAPES[shape][1:]
    fields = {
        "numel": x.numel(),
        "channels": channels(*SHAPES[shape]),
        "x": x,
        "y_dtype": dtype_number(x),
        "scale": scale,
    }
    wanted = {
        "fake_quant_float": (native.fake_quant_float(x, scale, "e4m3", *of, mask=True), {"format": FORMATS["e4m3"]}),
        "fake_quant_log": (native.fake_quant_float(x, scale, "nnie", *of, mask=True), {}),
    }
    if scale.numel() == 1:
        for kernel in ("tensor_quant", "fake_tensor_quant"):
            y, *_, mask = getattr(native, kernel)(x, scale, 8, False, True, True)
            wanted[kernel] = ((y, mask), {"bounds": (-127, 127)})
    for kernel, (results, options) in wanted.items():
        for order in ORDERS:
            got = [like(t) for t in results]
            run(kernel, order, y=got[0], mask=got[1], **fields, **options)
            for g, w in zip(got, results, strict=True):
                assert_same(g, w)


@pytest.mark.sweep(2)
@strided
@dtypes
@shapes
def test_fake_quant_backward(run, shape, dtype, layout):
    grad = input_of(shape, dtype, layout)
    mask = torch.randint(0, 256, ((grad.numel() + 7) // 8,), dtype=torch.uint8)
    wanted = native.fake_quant_backward(grad, mask, [])
    for order in ORDERS:
        dx = like(wanted)
        like_x = operand(torch.empty(0, dtype=dtype))  # only its dtype is read
        run(
            "fake_quant_backward",
            order,
            numel=grad.numel(),
            x=like_x,
            y=dx,
            y_dtype=dtype_number(dx),
            grad=grad,
            mask=mask,
        )
        assert_same(dx, wanted)


@pytest.mark.sweep(2)
@strided
@dtypes
@shapes
def test_learned_backward(kernels, run, shape, dtype, layout):
    """dx bit for bit. Sums are added in another order than on the CPU, so they agree bit for bit where they are exact."""
    sizes = SHAPES[shape][0]
    generator = torch.Generator().manual_seed(0)
    x = STRIDED[layout](torch.randint(-64, 64, sizes, generator=generator).to(dtype) / 8)
    grad = torch.randint(-4, 5, sizes, generator=generator).to(dtype)
    grid = [grid_of(shape, dtype)[0] * 0 + 0.125, grid_of(shape, dtype)[1].clamp(-8, 8)]
    check_learned_backward(kernels, run, shape, x, grad, grid, -16, 15)


@dtypes
@shapes
def test_learned_backward_of_any_values(kernels, run, shape, dtype):
    x, grad = input_of(shape, dtype), input_of(shape, dtype, "every_second", seed=1)
    check_learned_backward(kernels, run, shape, x, grad, grid_of(shape, dtype), -128, 127, exact=False)


def check_learned_backward(kernels, run, shape, x, grad, grid, qmin, qmax, exact=True) -> None:
    wanted = native.fake_quant_learned_backward(grad, x, *grid, qmin, qmax, *SHAPES[shape][1:], 0.5)
    fields = {
        "numel": x.numel(),
        "channels": channels(*SHAPES[shape]),
        "x": x,
        "grad": grad,
        "y_dtype": dtype_number(x),
    }
    sums = {}
    for order in ORDERS:
        dx, sums[order] = like(wanted[0]), torch.full((2, grid[0].numel()), torch.nan, dtype=torch.float64)
        results = {
            "y": dx,
            "scale": grid[0],
            "zero_point": grid[1],
            "sum_scale": sums[order][0],
            "sum_zero_point": sums[order][1],
        }
        run("fake_quant_learned_backward", order, bounds=(qmin, qmax), **fields, **results)
        assert_same(dx, wanted[0])
        assert torch.equal(sums[order], sums["forwards"])
    for row, sign, gradient in zip(sums["forwards"], (grid[0], None), wanted[1:], strict=True):
        got = like(gradient)
        to_pointers = pointers(row, sign, got)
        count, number = ctypes.c_int64(row.numel()), dtype_number(got)
        kernels.learned_gradient_on_host(
            to_pointers[0], ctypes.c_double(0.5), to_pointers[1], count, number, to_pointers[2]
        )
        if exact:
            assert_same(got, gradient)
        else:
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-2)


@pytest.mark.sweep(2)
@strided
@dtypes
@pytest.mark.parametrize("to", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32], ids=name_of)
def test_quantize_and_dequantize(run, dtype, to, layout):
    shape = "planes"
    x, (scale, zero_point) = input_of(shape, dtype, layout), grid_of(shape, dtype)
    low, high = max(torch.iinfo(to).min, -100), 100
    fields = {"numel": x.numel(), "channels": channels(*SHAPES[shape]), "scale": scale, "zero_point": zero_point}
    wanted = native.quantize(x, scale, zero_point, low, high, 1, dtype=to)
    values = native.dequantize(STRIDED[layout](wanted), scale, zero_point, 1, dtype=dtype)
    for order in ORDERS:
        got, back = like(wanted), like(values)
        run("quantize", order, x=x, y=got, y_dtype=dtype_number(got), bounds=(low, high), **fields)
        assert_same(got, wanted)
        run("dequantize", order, x=STRIDED[layout](wanted), y=back, y_dtype=dtype_number(back), **fields)
        assert_same(back, values)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 2051])
@pytest.mark.parametrize(
    ("number", "low", "high"), [(cuda_host.INT4, -8, 7), (cuda_host.UINT4, 0, 15)], ids=["int4", "uint4"]
)
@dtypes
def test_packed_codes(run, dtype, number, low, high, size):
    x, (scale, zero_point) = floats(dtype)(size), grid_of("one", dtype)
    fields = {"numel": size, "channels": channels((size,)), "scale": scale, "zero_point": zero_point}
    wanted = native.quantize_int4(x, scale, zero_point, low, high)
    values = native.dequantize_int4(wanted, [size], scale, zero_point, low < 0, dtype=dtype)
    for order in ORDERS:
        packed, back = like(wanted), like(values)
        run("quantize", order, x=x, y=packed, y_dtype=number, bounds=(low, high), **fields)
        assert_same(packed, wanted)
        run("dequantize", order, x=operand(packed, number), y=back, y_dtype=dtype_number(back), **fields)
        assert_same(back, values)


@strided
@pytest.mark.parametrize(
    ("block", "format", "scale_format"), [(16, "e2m1", "e4m3"), (32, "e4m3", "e8m0"), (48, "e5m2", "e8m0")]
)
@dtypes
def test_block_scale(run, dtype, block, format, scale_format, layout):
    x = STRIDED[layout](floats(dtype)(70, 2 * block))
    x = VALUES["a_nan"](x) if layout == "dense" else x
    tensor_scale = torch.tensor([0.01], dtype=arithmetic(dtype)) if scale_format == "e4m3" else None
    wanted = native.fake_quant_block(x, format, block, scale_format, tensor_scale)[1]
    fields = {"format": FORMATS[format], "scale_format": FORMATS[scale_format], "scale": tensor_scale}
    for order in ORDERS:
        got = like(wanted)
        shape = (1, block, 1, 1)  # inner is the size of a block
        run("block_scale", order, numel=got.numel(), channels=shape, x=x, y=got, y_dtype=dtype_number(got), **fields)
        assert_same(got, wanted)


@pytest.mark.parametrize("bins", [2, 64, 2048, 16384])
@dtypes
def test_histogram(run, dtype, bins):
    """Batches that widen the histogram: magnitudes grow, a negative value, one of another width, none, NaN at last."""
    batches = [floats(dtype, seed)(3000 * seed + 1).abs() * 4**seed for seed in range(3)]
    batches += [
        STRIDED["every_second"](floats(dtype)(50, 40)),
        torch.zeros(9, dtype=dtype),
        torch.empty(0, dtype=dtype),
    ]
    batches += [floats(dtype)(9) * 1000, torch.full((3,), torch.nan, dtype=dtype), floats(dtype)(9)]
    states = {order: empty_histogram(bins) for order in (*ORDERS, "cpu")}
    for x in batches:
        native.observe_histogram_(x, *states["cpu"])
        for order in ORDERS:
            counts, lo, hi = states[order]
            fields = {"numel": x.numel(), "channels": channels((x.numel(),)), "x": x, "bins": bins}
            run("histogram", order, counts=counts, lo=lo, hi=hi, **fields)
            for g, w in zip(states[order], states["cpu"], strict=True):
                assert_same(g, w)


@pytest.mark.sweep(2)
@strided
@dtypes
@pytest.mark.parametrize("bins", [64, 16384])
@pytest.mark.parametrize("shape", ["rows", "columns", "planes", "whole_vectors", "slices", "groups"])
def test_histograms_of_channels(run, shape, bins, dtype, layout):
    """A batch of small values, one that widens the histograms of some channels, and one with NaN in a channel."""
    of, count = SHAPES[shape][1:3], channels(*SHAPES[shape])[3]
    wider = input_of(shape, dtype, seed=1)
    wider[:, 0] *= 1000
    batches = [input_of(shape, dtype, layout).abs() / 64, wider, VALUES["a_nan"](wider)]
    states = {
        order: (torch.zeros(count, bins, dtype=torch.int64), *torch.zeros(2, count)) for order in (*ORDERS, "cpu")
    }
    for x in batches:
        native.observe_histogram_(x, *states["cpu"], *of)
        for order in ORDERS:
            counts, lo, hi = states[order]
            fields = {"numel": x.numel(), "channels": channels(*SHAPES[shape]), "x": x, "bins": bins}
            run("histogram", order, counts=counts, lo=lo, hi=hi, **fields)
            for g, w in zip(states[order], states["cpu"], strict=True):
                assert_same(g, w)


def empty_histogram(bins: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(bins, dtype=torch.int64), torch.zeros(()), torch.zeros(())


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.1, 1.0])
def test_ranges_are_blended_and_covered(kernels, momentum, counted):
    count, rows = 300, torch.randn(2, 300)
    rows[0, 5], rows[1, 7] = torch.nan, torch.inf
    lo, hi = torch.randn(2, 300).sort(0).values
    lo[:3], hi[:3] = torch.inf, -torch.inf
    got, wanted = [lo.clone(), hi.clone()], [lo.clone(), hi.clone()]
    skipped = [torch.zeros(count, dtype=torch.int64) if counted else None for _ in range(2)]
    native.observe_minmax_(rows, *wanted, momentum, 1, skipped=skipped[0])
    batch = torch.stack(native.minmax(rows, 1)).double()
    how = ctypes.c_int64(count), momentum is not None, ctypes.c_double(momentum or 0)
    kernels.blend_ranges_on_host(*pointers(*got, batch), *how, *pointers(skipped[1]))
    for g, w in zip(got, wanted, strict=True):
        assert_same(g, w)
    assert not counted or (skipped[0].sum() == 2 and torch.equal(*skipped))
    for symmetric in (True, False):
        grid = native.grid_of_range(*wanted, -128, 127, symmetric)
        covered = [torch.full((count,), 7.0), None if symmetric else torch.full((count,), 7.0)]
        ends = (ctypes.c_double(-128), ctypes.c_double(127))
        kernels.grid_of_ranges_on_host(*pointers(*wanted), ctypes.c_int64(count), *ends, *pointers(*covered))
        for g, w in zip(covered, grid, strict=True):
            assert g is None or assert_same(g, w) is None
