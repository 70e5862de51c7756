"""Values of the ops: against the oracle, against torch's own op, and against onnxruntime. All comparisons are exact."""

from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
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
    any_grid,
    any_tensor,
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

GRID = {"qmin": -100, "qmax": 90}


def with_mask(x: Tensor, scale: Tensor, zero_point: Tensor | None, **grid):
    return torch.ops.qtoolkit.fake_quant(x, scale, zero_point, **GRID | grid, mask=True)


def check_fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor | None, channels: Channels, **grid) -> None:
    grid = GRID | grid
    y, mask = with_mask(x, scale, zero_point, **channels.named, **grid)
    assert_same(y, reference.fake_quant(x, scale, zero_point, **channels.named, **grid))
    assert_same(ops.fake_quant(x, scale, zero_point, **channels.named, **grid), y)
    inside = reference.inside(x, scale, zero_point, **channels.named, **grid)
    assert torch.equal(mask, reference.packed(inside, y))


def check_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, channels: Channels, dtype: torch.dtype) -> None:
    grid = dict(zip(("qmin", "qmax"), bounds(dtype), strict=True)) | channels.named | {"dtype": dtype}
    q = ops.quantize(x, scale, zero_point, **grid)
    assert_same(q, reference.quantize(x, scale, zero_point, **grid))
    assert_laid_out_as(q, x, channels.group)


# ---- every layout, dtype and way to see channels ----------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_fake_quant(layout, channels, dtype):
    x = layout(floats(dtype))
    before, scale = x.clone(), scales(channels.count(x))
    for zero_point in (None, zero_points(channels.count(x))):
        check_fake_quant(x, scale, zero_point, channels)
    assert_laid_out_as(ops.fake_quant(x, scale, **channels.named), x, channels.group)
    assert_same(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_flushed_denormals_are_the_same_wherever_they_stand(dtype):
    """Denormal float16 numbers are normal float32 ones, which no mode of the processor flushes."""
    x = torch.tensor([3e-7, 5.9e-8, 1e-5, -6e-8]).to(dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        many, few = (ops.fake_quant(x.repeat(n), torch.tensor(2**-24), None, -(2**20), 2**20) for n in (64, 1))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(many, few.repeat(64))
    assert torch.equal(few, ops.fake_quant(x, torch.tensor(2**-24), None, -(2**20), 2**20))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_quantize(layout, channels, dtype):
    x = layout(floats(dtype))
    for code in CODES:
        check_quantize(x, scales(channels.count(x)), zero_points(channels.count(x)), channels, code)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_dequantize(layout, channels, dtype):
    for code in CODES:
        q = layout(codes(code))
        grid = scales(channels.count(q)), zero_points(channels.count(q))
        y = ops.dequantize(q, *grid, **channels.named, dtype=dtype)
        assert_same(y, reference.dequantize(q, *grid, **channels.named, dtype=dtype))
        assert_laid_out_as(y, q, channels.group)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases(empty=False))
def test_minmax(layout, channels, dtype):
    x = layout(floats(dtype))
    for got, wanted in zip(ops.minmax(x, **channels.named), reference.minmax(x, **channels.named), strict=True):
        assert_same(got, wanted)
        assert got.is_contiguous()


def new_ranges(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.full((count,), torch.inf, dtype=dtype), torch.full((count,), -torch.inf, dtype=dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_observe_minmax(layout, channels, dtype):
    x = layout(floats(dtype))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    ranges = new_ranges(channels.count(x), kept)
    for seed in range(2):
        x = layout(floats(dtype, seed))
        wanted = reference.moved(ranges, x, None, **channels.named)
        ops.observe_minmax_(x, *ranges, **channels.named)
        for got, want in zip(ranges, wanted, strict=True):
            assert_same(got, want.to(kept))


# ---- around the kernels' chunk, block, row and thread -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("run", RUNS, ids=name_of)
@pytest.mark.parametrize("group", [1, "batch"])
def test_channel_runs(run, dtype, group):
    channels = Channels(1, run[0] if group == "batch" else 1)
    x, count = floats(dtype)(*run), channels.count(torch.empty(run))
    check_fake_quant(x, scales(count), zero_points(count), channels)
    check_quantize(x, scales(count), zero_points(count), channels, torch.int8)
    q = codes(torch.uint8)(*run)
    assert_same(
        ops.dequantize(q, scales(count), **channels.named), reference.dequantize(q, scales(count), **channels.named)
    )
    for got, wanted in zip(ops.minmax(x, **channels.named), reference.minmax(x, **channels.named), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("memory", ["row_major", "permuted"])
@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_blocks(block, memory, dtype):
    x, channels = input_in_blocks(block, memory, dtype)
    count = channels.count(x)
    check_fake_quant(x, scales(count), zero_points(count), channels)
    check_quantize(x, scales(count), zero_points(count), channels, torch.int8)
    for got, wanted in zip(ops.minmax(x, **channels.named), reference.minmax(x, **channels.named), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "sliced"])
def test_scales_of_blocks_in_their_shape_or_in_a_row(layout):
    x = LAYOUTS[layout](floats(torch.float32))
    s, z = scales(x.numel() // 3), zero_points(x.numel() // 3)
    shape = list(x.shape)
    shape[1] //= 3
    flat = ops.fake_quant(x, s, z, axis=1, block_size=3)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):  # the second lies otherwise in memory
        back = sorted(range(4), key=order.__getitem__)
        given_as = [t.view(shape).permute(order).contiguous().permute(back) for t in (s, z)]
        assert_same(ops.fake_quant(x, *given_as, axis=1, block_size=3), flat)
    assert_same(ops.fake_quant(x, scales(1), axis=1, block_size=3), ops.fake_quant(x, scales(1)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, dtype):
    x = floats(dtype)(size)
    check_fake_quant(x, scales(1), zero_points(1), Channels())
    check_quantize(x, scales(1), None, Channels(), torch.int16)
    for got, wanted in zip(ops.minmax(x), reference.minmax(x), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("at", [0, 1, 63, 64, 1000, 1023, 1024, 40000, 65537 - 1])
def test_minmax_finds_one_element_anywhere(at):
    x = torch.zeros(65537)
    x[at] = 5
    assert [t.item() for t in ops.minmax(x)] == [0, 5]
    x[at] = -5
    assert [t.item() for t in ops.minmax(x)] == [-5, 0]
    x[at] = torch.nan
    assert all(t.isnan() for t in ops.minmax(x))


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_nan_stays_in_its_channel(run):
    x = floats(torch.float32)(*run)
    x[-1, -1, -1] = torch.nan
    x[0, 0, 0] = torch.nan
    for got, wanted in zip(ops.minmax(x, axis=1), reference.minmax(x, axis=1), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_do_not_depend_on_threads(count, threads):
    x, grid = floats(torch.bfloat16)(3, 70, 777), (scales(70), zero_points(70))
    threads(count)
    check_fake_quant(x, *grid, Channels(1))
    check_quantize(x, *grid, Channels(1), torch.int8)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_scale_of_any_dtype(x_dtype, dtype):
    x, scale = floats(x_dtype)(4, 6, 50), scales(6, dtype=dtype)
    check_fake_quant(x, scale, zero_points(6).to(dtype), Channels(1))
    check_fake_quant(x, scale[:1], None, Channels())


@pytest.mark.parametrize("shape", [(6,), (1, 6, 1), (6, 1), (3, 2), "stepped"])
def test_scale_of_any_shape(shape):
    x, scale = floats(torch.float32)(4, 6, 50), scales(6)
    given_as = scale.repeat_interleave(2)[::2] if shape == "stepped" else scale.reshape(shape)
    assert_same(ops.fake_quant(x, given_as, axis=1), ops.fake_quant(x, scale, axis=1))


def test_one_scale_for_every_channel():
    x, scale = floats(torch.float32)(4, 6, 50), scales(1)
    assert_same(ops.fake_quant(x, scale, axis=1, group=2), ops.fake_quant(x, scale))
    assert_same(ops.fake_quant(x, scale[0], axis=0), ops.fake_quant(x, scale))


def test_negative_view():
    x = floats(torch.float32)(3, 50)
    assert_same(ops.fake_quant(torch._neg_view(x), scales(1)), ops.fake_quant(-x, scales(1)))


def test_fractional_zero_point_is_rounded_half_to_even():
    x = floats(torch.float32)(1000)
    for fraction, whole in ((3.4, 3.0), (2.5, 2.0), (3.5, 4.0), (-0.5, 0.0), (-1.5, -2.0)):
        y = ops.fake_quant(x, scales(1), torch.tensor(fraction))
        assert torch.equal(y, ops.fake_quant(x, scales(1), torch.tensor(whole)))


# ---- the edges of the grid --------------------------------------------------------------------------------------------


def ties(scale: Tensor, lowest: int, highest: int) -> Tensor:
    """k + 0.5 steps, and the neighbours above and below, of each scale: (scales, points)."""
    k = torch.arange(lowest, highest, dtype=scale.dtype) + 0.5
    at = k * scale[:, None]
    beside = [torch.nextafter(at, torch.tensor(end, dtype=at.dtype)) for end in (torch.inf, -torch.inf)]
    return torch.cat([at, *beside], 1)


def many_scales(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.logspace(-6, 3, count, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("zero_point", [None, 7.0])
def test_ties(dtype, zero_point):
    scale = many_scales(400, dtype)
    x, z = ties(scale, -140, 140), None if zero_point is None else torch.full((400,), zero_point)
    check_fake_quant(x, scale, z, Channels(0), qmin=-128, qmax=127)
    check_quantize(x, scale, z, Channels(0), torch.int8)


def test_ties_per_tensor():
    for scale in many_scales(300):
        x = ties(scale[None], -140, 140)
        check_fake_quant(x, scale, None, Channels(), qmin=-128, qmax=127)


def test_ties_of_sixteen_bits():
    scale = many_scales(5)
    check_quantize(ties(scale, -33000, 33000), scale, None, Channels(0), torch.int16)
    check_quantize(ties(scale, -33000, 33000), scale, torch.full((5,), 32768.0), Channels(0), torch.uint16)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(
    "scale", [0.1, -0.1, 0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e30, 3e38, torch.inf, torch.nan]
)
@pytest.mark.parametrize("zero_point", [None, 5.0, -0.0])
def test_special_values(dtype, scale, zero_point):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(6)
    grid = torch.tensor(scale), None if zero_point is None else torch.tensor(zero_point)
    check_fake_quant(x, *grid, Channels())
    check_quantize(x, *grid, Channels(), torch.int8)


def test_special_values_in_words():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 1e-40])
    y = ops.fake_quant(x, torch.tensor(0.5), qmin=-8, qmax=7)
    assert y[0].isnan()
    assert y[1:].tolist() == [3.5, -4.0, 3.5, -4.0, 0.0]
    assert ops.quantize(x, torch.tensor(0.5), qmin=-8, qmax=7).tolist() == [-8, 7, -8, 7, -8, 0]


def test_zero_scale_gives_zeros_and_negative_counts_by_magnitude():
    x = floats(torch.float32)(1000)
    assert ops.fake_quant(x, torch.tensor(0.0)).abs().max() < 1e-35
    assert_same(ops.fake_quant(x, torch.tensor(-0.1)), ops.fake_quant(x, torch.tensor(0.1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize(
    ("scale", "zero_point"), [(0.1, None), (2**-7, 3), (1e-6, -9), (3e-8, None), (700.0, 5), (1e-3, 0)]
)
def test_every_sixteen_bit_float(dtype, scale, zero_point):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    grid = torch.tensor(scale), None if zero_point is None else torch.tensor(float(zero_point))
    check_fake_quant(x, *grid, Channels(), qmin=-128, qmax=127)
    check_fake_quant(x, *grid, Channels(), qmin=-32768, qmax=32767)
    check_quantize(x, *grid, Channels(), torch.int8)
    for got, wanted in zip(ops.minmax(x[x == x]), reference.minmax(x[x == x]), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("dtype", CODES, ids=name_of)
def test_round_trip_of_every_code(dtype):
    low, high = bounds(dtype)
    q = torch.arange(max(low, -40000), min(high, 80000) + 1).to(dtype)
    grid = torch.tensor(0.03), torch.tensor(11.0)
    assert torch.equal(ops.quantize(ops.dequantize(q, *grid), *grid, qmin=low, qmax=high, dtype=dtype), q)


@pytest.mark.parametrize("qmax", [2**31 - 1, 2**31 - 2, 2**24 + 1, 2**24 + 3, 127])
def test_codes_stay_within_qmin_and_qmax(qmax):
    x = torch.tensor([torch.inf, 3e9, 2.0**31, float(qmax), -torch.inf, -3e9, torch.nan])
    for dtype in (torch.float32, torch.float64):
        for low, high in (
            (-qmax, qmax),
            (1 - qmax, qmax - 2),
            (qmax // 2, qmax),
            (2**24 + 1, qmax),
            (-qmax, -(2**24) - 1),
        ):
            if low + 9 < high:
                q = ops.quantize(x.to(dtype), torch.tensor(1.0), qmin=low, qmax=high, dtype=torch.int32)
                assert low <= q.min() <= q.max() <= high
                assert_same(q, reference.quantize(x.to(dtype), torch.tensor(1.0), None, low, high, dtype=torch.int32))


# ---- observers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kept", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("momentum", [0.1, 0.01, 1.0, 1e-6])
@pytest.mark.parametrize("how", ["per_tensor", "axis1", "grouped"])
def test_moving_range(dtype, kept, momentum, how):
    channels, make = CHANNELS[how], LAYOUTS["channels_last"]
    ranges = new_ranges(channels.count(make(torch.empty)), kept)
    for seed in range(4):
        x = make(floats(dtype, seed))
        wanted = reference.moved(ranges, x, momentum, **channels.named)
        ops.observe_minmax_(x, *ranges, momentum, **channels.named)
        for got, want in zip(ranges, wanted, strict=True):
            # one difference, one product, one sum: three roundings of numbers below 2 * 40
            assert (got.double() - want).abs().max() <= 3 * 80 * torch.finfo(kept).eps
            if seed == 0:
                assert_same(got, want.to(kept))  # the first range is taken as it is


def test_the_first_range_that_is_not_of_zeros_alone_is_taken_whole():
    """Of a dead ReLU, or of a padded batch: an average with zeros would take 20 steps to cover what follows."""
    lo, hi = new_ranges(3, torch.float32)
    for x in ([[0, 0, 0], [0, 0, 1]], [[2, 0, -3], [4, 0, -1]], [[0, 0, 0], [0, 0, 0]]):
        ops.observe_minmax_(torch.tensor(x, dtype=torch.float32), lo, hi, 0.25, axis=1)
    assert_same(lo, torch.tensor([1.5, 0, -0.5625]))
    assert_same(hi, torch.tensor([3.0, 0, 0.375]))


def test_nan_poisons_only_its_running_range():
    lo, hi = new_ranges(3, torch.float32)
    x = floats(torch.float32)(2, 3, 40)
    ops.observe_minmax_(x, lo, hi, axis=1)
    x[1, 2, 7] = torch.nan
    for _ in range(2):
        ops.observe_minmax_(x, lo, hi, axis=1)
        assert lo.isnan().tolist() == hi.isnan().tolist() == [False, False, True]
        x = x.nan_to_num()  # once met, it stays: calibration must be able to name it


def test_observing_counts_as_a_change_in_place():
    """Autograd must see that lo was changed under a saved tensor, as it does for every op of torch that ends in _."""
    lo, hi = new_ranges(1, torch.float32)
    ops.observe_minmax_(torch.ones(3), lo, hi)
    assert (lo._version, hi._version) == (1, 1)


# ---- any of it --------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_anything(data):
    x = data.draw(any_tensor())
    scale, zero_point, channels = data.draw(any_grid(x))
    bits, signed = data.draw(st.integers(2, 16)), data.draw(st.booleans())
    qmin = -(2 ** (bits - 1)) if signed else 0
    check_fake_quant(x, scale, zero_point, channels, qmin=qmin, qmax=qmin + 2**bits - 1)
    code = data.draw(st.sampled_from(CODES))
    check_quantize(x, scale, zero_point, channels, code)
    q = ops.quantize(x, scale, zero_point, *bounds(code), **channels.named, dtype=code)
    back = ops.dequantize(q, scale, zero_point, **channels.named, dtype=x.dtype)
    assert_same(back, reference.dequantize(q, scale, zero_point, **channels.named, dtype=x.dtype))
    if x.numel() > 0:
        for got, wanted in zip(ops.minmax(x, **channels.named), reference.minmax(x, **channels.named), strict=True):
            assert_same(got, wanted)


# ---- torch's own op, where it follows the same rule -------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-12, -7, -3, 0, 2])
@pytest.mark.parametrize(
    ("zero_point", "qmin", "qmax"), [(0, -128, 127), (5, -128, 127), (128, 0, 255), (3, -8, 7), (0, -127, 127)]
)
def test_torch_with_a_power_of_two(exponent, zero_point, qmin, qmax):
    """There 1 / scale is exact, so multiplying by it is dividing."""
    scale = 2.0**exponent
    x = torch.cat([ties(torch.tensor([scale]), -300, 300)[0], torch.randn(10000) * 100 * scale])
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, qmin, qmax)
    assert torch.equal(ops.fake_quant(x, torch.tensor(scale), torch.tensor(float(zero_point)), qmin, qmax), theirs)
    channels = torch.full((3,), scale) * torch.tensor([1.0, 2.0, 4.0])
    z = torch.full((3,), zero_point, dtype=torch.int32)
    x = x[:9999].view(3, -1)
    theirs = torch.fake_quantize_per_channel_affine(x, channels, z, 0, qmin, qmax)
    assert torch.equal(ops.fake_quant(x, channels, z.float(), qmin, qmax, axis=0), theirs)


# ---- onnxruntime ------------------------------------------------------------------------------------------------------

ONNX_TYPES = {
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int16: TensorProto.INT16,
    torch.uint16: TensorProto.UINT16,
}


@cache
def session(op: str, dtype: torch.dtype, per_axis: bool) -> ort.InferenceSession:
    """A model of one QuantizeLinear or DequantizeLinear, with scale and zero point as inputs."""
    code, real = ONNX_TYPES[dtype], TensorProto.FLOAT
    source, result = (real, code) if op == "QuantizeLinear" else (code, real)
    node = helper.make_node(op, ["x", "scale", "zero_point"], ["y"], axis=0)
    vector = ["c"] if per_axis else []
    inputs = [("x", source, ["n", "m"]), ("scale", real, vector), ("zero_point", code, vector)]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info("y", result, ["n", "m"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def onnxruntime(op: str, x: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype) -> Tensor:
    z = zero_point.to(dtype).numpy()
    feed = {"x": x.numpy(), "scale": scale.numpy(), "zero_point": z}
    return torch.from_numpy(session(op, dtype, scale.dim() == 1).run(None, feed)[0])


def deployed_grid(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    low, high = bounds(dtype)
    return many_scales(count), torch.linspace(low, high, count).round().clamp(low, high)


@pytest.mark.parametrize("dtype", ONNX_TYPES, ids=name_of)
def test_onnxruntime_per_axis(dtype):
    count = 1000 if dtype.itemsize == 1 else 300
    scale, z = deployed_grid(dtype, count)
    x = torch.cat(
        [
            ties(scale, -400, 400),
            torch.randn(count, 500) * 300 * scale[:, None],
            torch.tensor(SPECIAL).expand(count, -1),
        ],
        1,
    )
    q = ops.quantize(x, scale, z, *bounds(dtype), axis=0, dtype=dtype)
    assert_same(q, onnxruntime("QuantizeLinear", x, scale, z, dtype))
    q = codes(dtype)(count, 700)
    assert_same(ops.dequantize(q, scale, z, axis=0), onnxruntime("DequantizeLinear", q, scale, z, dtype))


@pytest.mark.parametrize("dtype", ONNX_TYPES, ids=name_of)
def test_onnxruntime_per_tensor(dtype):
    half = (bounds(dtype)[1] - bounds(dtype)[0]) // 2
    for scale, z in zip(*deployed_grid(dtype, 1000), strict=True):
        x = torch.cat(
            [
                ties(scale[None], -half - 300, -half + 300),
                ties(scale[None], half - 300, half + 300),
                ties(scale[None], -300, 300),
            ]
        )
        q = ops.quantize(x, scale, z, *bounds(dtype), dtype=dtype)
        assert_same(q, onnxruntime("QuantizeLinear", x, scale, z, dtype))
        y = ops.fake_quant(x, scale, z, *bounds(dtype))
        assert_same(y, onnxruntime("DequantizeLinear", q, scale, z, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_dequantize_of_large_results_is_streamed(axis, dtype):
    """The values of a part, which the caches hold."""
    codes = torch.arange(6 * 800_013).remainder(251).sub(125).to(torch.int8).view(6, -1)
    scale = torch.tensor(0.3) if axis is None else torch.linspace(0.1, 2.0, codes.size(axis))
    y = ops.dequantize(codes, scale, axis=axis, dtype=dtype)
    for row, (got, of_row) in enumerate(zip(y, codes, strict=True)):
        of_scale = scale[row] if axis == 0 else scale
        assert_same(got, ops.dequantize(of_row, of_scale, axis=0 if axis == 1 else None, dtype=dtype))


def test_oracle_itself_on_numbers_worked_out_by_hand():
    x = torch.tensor([-1.0, -0.25, 0.25, 0.75, 0.3, 9.0])
    assert reference.fake_quant(x, torch.tensor(0.5), None, -1, 3).tolist() == [-0.5, 0, 0, 1, 0.5, 1.5]
    assert reference.inside(x, torch.tensor(0.5), None, -1, 3).tolist() == [False, True, True, True, True, False]
    assert reference.quantize(x, torch.tensor(0.5), torch.tensor(2.0), 0, 255, dtype=torch.uint8).tolist() == [
        0,
        2,
        2,
        4,
        3,
        20,
    ]
    channel, count = reference.channels((4, 2, 1), 1, 2)
    assert channel.reshape(-1).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert count == 4
    assert np.float32(reference.TINY) == np.float32(2**-126)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 6), (8,)], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_an_rms_norm_has_the_bits_of_torchs(eps, shape, dtype):
    """In values and gradients, also where its eps is that of the type in which torch computes."""
    x = floats(dtype)(*shape).requires_grad_()
    norm = torch.nn.RMSNorm(shape[-2:], eps=eps).to(dtype)
    norm.weight.data.copy_(floats(dtype, 1)(*shape[-2:]))
    scale, grad = torch.tensor(0.05, dtype=dtype), floats(dtype, 2)(*shape)
    wanted = torch.ops.qtoolkit.fake_quant(norm(x), scale, None, -128, 127)[0]
    own = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if eps is None else eps
    function = ("rms_norm", shape[-2:], norm.weight, None, own)
    found, *_ = torch.ops.qtoolkit.function_fake_quant(
        x, *function, True, scale, *[None] * 3, -128, 127, 1.0, *[False] * 3
    )
    assert_same(found, wanted)
    inputs = [x, norm.weight]
    for got, want in zip(*(torch.autograd.grad(y, inputs, grad) for y in (found, wanted)), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("shape", "weight", "sentence"),
    [
        ((), None, "shape must be the last dimensions of x"),
        ((5,), None, "shape must be the last dimensions of x"),
        ((2, 3, 4, 8), None, "shape must be the last dimensions of x"),
        ((8,), (1,), "weight must have the shape of the norm"),
    ],
)
def test_an_rms_norm_of_other_sizes_is_refused(shape, weight, sentence):
    x, scale = torch.ones(3, 4, 8), torch.ones(1)
    function = ("rms_norm", shape, None if weight is None else torch.ones(weight), None, 1e-6)
    with pytest.raises(ValueError, match=f"function_fake_quant: {sentence}"):
        torch.ops.qtoolkit.function_fake_quant(x, *function, True, scale, *[None] * 3, -8, 7, 1.0, *[False] * 3)
    grid = (scale, *[None] * 3, -8, 7, 1.0, scale, torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match=sentence):
        torch.ops.qtoolkit.function_fake_quant_backward(
            x, [0, 1, 2], x, *function, *grid, torch.ones(3, 4, 1), [True] * 6
        )
    of_row = ("rms_norm", (8,), None, None, 1e-6)
    with pytest.raises(ValueError, match="rstd must be what function_fake_quant returned"):
        torch.ops.qtoolkit.function_fake_quant_backward(x, [0, 1, 2], x, *of_row, *grid, torch.ones(3), [True] * 6)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_with_their_codes(layout, dtype, kind):
    """The op of a quantizer writes both in one pass: those of fake_quant and quantize, of special values too."""
    x = LAYOUTS[layout](floats(dtype)).clone()
    flat = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)[: len(flat)]
    scale, zero_point = scales(1), torch.tensor([3.0])
    grid = bounds(kind)
    function = ("none", [], None, None, 0.0, False)
    for zero in (None, zero_point):
        arguments = (scale, None, None, zero, *grid, 1.0, False, False, True)
        y, codes, _, mask, *_ = torch.ops.qtoolkit.function_fake_quant(x, *function, *arguments)
        wanted, bits = torch.ops.qtoolkit.fake_quant(x, scale, zero, *grid, mask=True)
        assert_same(y, wanted)
        assert_same(mask, bits)
        of_values = ops.quantize(x, scale, zero, *grid, dtype=kind)
        assert_same(codes, of_values)
        assert_laid_out_as(codes, of_values)
        narrow, *_ = torch.ops.qtoolkit.function_fake_quant(x, *function, *arguments, dtype=torch.bfloat16)
        assert_same(narrow, wanted.to(torch.bfloat16))
        with pytest.raises(TypeError, match="function_fake_quant: dtype must be float32, .*, got Int"):
            torch.ops.qtoolkit.function_fake_quant(x, *function, *arguments, dtype=torch.int32)
