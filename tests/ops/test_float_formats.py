"""fake_quant_float and fake_quant_block: against ml_dtypes, torch's casts and the oracle. All exact."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import (
    FLOATS,
    RUNS,
    SIZES,
    SPECIAL,
    Channels,
    Make,
    assert_laid_out_as,
    assert_same,
    floats,
    generator,
    layout_cases,
    leaf,
    name_of,
    scales,
)

native = torch.ops.qtoolkit
FORMATS = ("e4m3", "e5m2", "e2m1")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ONE = torch.ones(())
PER_TENSOR = Channels()

formats = pytest.mark.parametrize("format", FORMATS)
all_formats = pytest.mark.parametrize("format", [*FORMATS, "nnie"])
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def check(x: Tensor, scale: Tensor, format: str, channels: Channels = PER_TENSOR) -> None:
    wanted, inside = reference.fake_quant_float(x, scale, format, **channels.named)
    y, mask = native.fake_quant_float(x, scale, format, *channels.named.values(), True)
    assert_same(y, wanted)
    assert torch.equal(mask, reference.packed(inside, y))
    assert_same(ops.fake_quant_float(x, scale, format, **channels.named), y)
    assert_laid_out_as(y, x, channels.group)


# ---- values -----------------------------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_every_16_bit_number_against_ml_dtypes(format, dtype):
    x, most = every(dtype), LARGEST[format]
    clamped = x.float().nan_to_num(0).clamp(-most, most).numpy()
    wanted = clamped.astype(ML_DTYPES[format]).astype(np.float32)
    wanted = torch.where(x.isnan(), torch.nan, torch.from_numpy(wanted))
    assert_same(ops.fake_quant_float(x, ONE, format), wanted.to(dtype))
    check(x, ONE, format)


@pytest.mark.parametrize("format", TORCH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_every_16_bit_number_against_torch(format, dtype):
    x, most = every(dtype), LARGEST[format]
    assert_same(ops.fake_quant_float(x, ONE, format), x.clamp(-most, most).to(TORCH[format]).to(dtype))


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_ties_and_their_neighbours(format, dtype):
    """Halfway between any two numbers of the format, half a step beyond the last, and the next numbers on both sides."""
    numbers = torch.from_numpy(reference.FORMATS[format])
    last = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
    ties = torch.cat([(numbers[1:] + numbers[:-1]) / 2, last[None], numbers]).to(dtype)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    x = torch.cat([ties, ties.nextafter(infinity), ties.nextafter(-infinity)])
    x = torch.cat([x, -x])
    check(x, ONE, format)
    if dtype == torch.float32:  # ml_dtypes casts float64 by way of float32, which rounds twice
        inner = x[x.abs() < last]
        wanted = inner.numpy().astype(ML_DTYPES[format]).astype(np.float32)
        assert_same(ops.fake_quant_float(inner, ONE, format), torch.from_numpy(wanted))


@formats
def test_the_numbers_of_the_format_stay(format):
    numbers = torch.from_numpy(reference.FORMATS[format])
    count = {"e4m3": 127, "e5m2": 124, "e2m1": 8}[format]
    assert len(numbers) == count
    for scale in (1.0, 0.25, 2.0**40):
        x = torch.cat([numbers, -numbers]).float() * scale
        assert_same(ops.fake_quant_float(x, torch.tensor(scale), format), x)


@all_formats
@dtypes
def test_special_values(format, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(20)
    for scale in (1.0, 0.1, 1e-38, 1e-45, 0.0, 1e38, -2.0, torch.inf, torch.nan):
        check(x, torch.tensor(scale), format)


def test_what_saturates():
    x = torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan])
    for format, most in LARGEST.items():
        assert_same(ops.fake_quant_float(x, ONE, format), torch.tensor([most, -most, most, torch.nan]))


@pytest.mark.sweep(2)
@all_formats
@dtypes
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_layouts(layout, channels, dtype, format):
    x = layout(floats(dtype))
    check(x, scales(channels.count(x)), format, channels)


@all_formats
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run, format):
    for group in (1, run[0]):
        channels, x = Channels(1, group), floats(torch.bfloat16)(*run)
        check(x, scales(channels.count(x)), format, channels)


@all_formats
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, format):
    check(floats(torch.float32)(size), scales(1), format)


# ---- the logarithmic grid ---------------------------------------------------------------------------------------------


def nnie(x: Tensor, amax: float) -> Tensor:
    return ops.fake_quant_float(x, torch.tensor(amax), "nnie")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("amax", [1.0, 6.3, 2.0**-117, 3e37])
def test_halfway_between_logarithms_and_its_neighbours(amax, dtype):
    """Halves of sixteenths of octaves, the numbers themselves, and the next numbers on both sides, from zero on."""
    n = torch.arange(-160, 3, dtype=torch.float64)
    steps = torch.cat([n, n + 0.5]) / 16 + round(16 * math.log2(amax)) / 16
    points = torch.cat([steps.exp2(), steps.exp2() / 2]).to(dtype)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    x = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    check(torch.cat([x, -x]), torch.tensor(amax), "nnie")


def test_a_byte_of_logarithmic_codes():
    """128 magnitudes, of which the lowest has no negative, and zero: as many as a byte has codes."""
    x = torch.cat([torch.linspace(-14, 0, 40_001).exp2(), torch.zeros(1)])
    found = nnie(torch.cat([x, -x]), 1.0).unique()
    k = torch.arange(128, dtype=torch.float64)
    magnitudes = ((k - 127) / 16).exp2().float()
    assert_same(found, torch.cat([-magnitudes[1:].flip(0), torch.zeros(1), magnitudes]))


def test_where_logarithmic_numbers_become_zero():
    lowest = 2.0 ** (-127 / 16)
    x = torch.tensor([lowest / 2 * 1.001, lowest / 2 * 0.999, -lowest / 2 * 1.04, -lowest / 2 * 1.05, 0.0, -0.0])
    wanted = torch.tensor([lowest, 0, 0, -lowest * 2 ** (1 / 16), 0, 0])
    assert_same(nnie(x, 1.0), wanted)


def test_logarithmic_scales_are_the_largest_number():
    """A scale counts as the nearest number of the grid."""
    x = torch.tensor([100.0, -100.0, torch.inf])
    for amax, n in ((1.0, 0), (6.3, 42), (2.0**0.5, 8)):
        largest = 2.0 ** (n / 16)
        assert_same(nnie(x, amax), torch.tensor([largest, -largest, largest]))


def test_float64_is_rounded_once():
    """By way of float32, which would round it to a tie, it would come out as 1."""
    x = torch.tensor([1.0625 + 2.0**-40, 1.0625, 1.0625 - 2.0**-40], dtype=torch.float64)
    assert ops.fake_quant_float(x, ONE, "e4m3").tolist() == [1.125, 1.0, 1.0]


# ---- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@all_formats
@dtypes
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_gradient(layout, channels, dtype, format):
    x = leaf(layout(floats(dtype)))
    scale, grad = scales(channels.count(x)), floats(dtype, 7)(*x.shape)
    ops.fake_quant_float(x, scale, format, **channels.named).backward(grad)
    _, inside = reference.fake_quant_float(x, scale, format, **channels.named)
    assert_same(x.grad, torch.where(inside, grad, 0))


def test_gradient_at_the_end_of_the_format():
    """What rounds to the largest number passes, half a step beyond it by the parity of its code."""
    for format, passes, stops in (("e4m3", 464.0, 464.1), ("e5m2", 61439.0, 61440.0), ("e2m1", 6.99, 7.0)):
        x = leaf(torch.tensor([passes, -passes, stops, -stops, torch.inf, torch.nan]))
        ops.fake_quant_float(x, ONE, format).sum().backward()
        assert x.grad.tolist() == [1, 1, 0, 0, 0, 0], format


def test_double_backward():
    x, g = leaf(torch.tensor([1.0, 9.0], dtype=torch.float64)), leaf(torch.ones(2, dtype=torch.float64))
    (dx,) = torch.autograd.grad(ops.fake_quant_float(x, ONE, "e2m1"), x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx.sum(), g)
    assert dg.tolist() == [1, 0]


def test_one_bit_an_element_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.fake_quant_float(leaf(torch.randn(1000)), ONE, "e4m3")
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 125)]


# ---- with the rest of torch -------------------------------------------------------------------------------------------


def opcheck_cases() -> dict[str, tuple]:
    x = floats(torch.float32)(4, 6, 5, 7)
    return {
        "per_tensor": (x, scales(1), "e4m3"),
        "masked": (x, scales(1), "e2m1", None, 1, 0, True),
        "blocks": (x, scales(280).view(4, 2, 5, 7), "e4m3", 1, 1, 3),
        "differentiable": (leaf(x), scales(6), "e5m2", 1),
        "channels_last": (leaf(x.to(memory_format=torch.channels_last)), scales(6), "e4m3", 1),
        "grouped": (leaf(x.bfloat16()), scales(12), "e4m3", 1, 2),
        "sliced": (leaf(x[::2, :, 1:]), scales(1), "e4m3"),
        "empty": (leaf(x[:0]), scales(1), "e4m3"),
        "0-d": (leaf(x[0, 0, 0, 0]), scales(1), "e4m3"),
    }


@pytest.mark.parametrize("args", opcheck_cases().values(), ids=opcheck_cases())
def test_opcheck(args):
    torch.library.opcheck(native.fake_quant_float.default, args)


@all_formats
def test_compile(format):
    def step(x: Tensor, scale: Tensor) -> Tensor:
        return (ops.fake_quant_float(x, scale, format, axis=1) * 2).relu()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((2, 6, 9), (5, 6, 33)):
        x, y = (leaf(floats(torch.float32)(*sizes)) for _ in range(2))
        assert_same(compiled(x, scales(6)), step(y, scales(6)))
        compiled(x, scales(6)).sum().backward()
        step(y, scales(6)).sum().backward()
        assert_same(x.grad, y.grad)


# ---- block scales -----------------------------------------------------------------------------------------------------

KINDS = {
    "mx_e4m3": ("e4m3", 32, "e8m0"),
    "mx_e5m2": ("e5m2", 32, "e8m0"),
    "mx_e2m1": ("e2m1", 32, "e8m0"),
    "nvfp4": ("e2m1", 16, "e4m3"),
    "long": ("e4m3", 1024, "e8m0"),
    "odd": ("e2m1", 48, "e4m3"),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def spread(dtype: torch.dtype) -> Make:
    """Rows of very different magnitude, some of zeros."""

    def make(*sizes: int) -> Tensor:
        power = torch.randint(-12, 12, (*sizes[:-1], 1), generator=generator(3))
        return (floats(torch.float64)(*sizes) * 2.0**power * (power != 5)).to(dtype)

    return make


def check_blocks(x: Tensor, kind: tuple, tensor_scale: Tensor | None = None) -> None:
    wanted, wanted_scales, inside = reference.fake_quant_block(x, *kind, tensor_scale)
    y, found, mask = native.fake_quant_block(x, *kind, tensor_scale, True)
    assert_same(y, wanted)
    assert_same(found, wanted_scales)
    assert torch.equal(mask, reference.packed(inside, y))
    assert y.is_contiguous()
    given = leaf(x)
    grad = floats(x.dtype, 7)(*x.shape)
    ops.fake_quant_block(given, *kind, tensor_scale).backward(grad)
    assert_same(given.grad, torch.where(inside, grad, 0))


@kinds
@dtypes
def test_blocks(kind, dtype):
    make, size = spread(dtype), kind[1]
    inputs = [make(size), make(7, 5, 3 * size), make(2, 0, size), make(700, size), make(3, 2 * size, 5).transpose(1, 2)]
    inputs += [make(9, 4 * size)[::2, size : 3 * size], make(2, 3, 4, size).to(memory_format=torch.channels_last)]
    for x in inputs:
        check_blocks(x, kind)
        if kind[2] == "e4m3":
            check_blocks(x, kind, torch.tensor(0.037))


@kinds
@dtypes
def test_special_blocks(kind, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    rows = torch.cat([x[:, None].expand(-1, kind[1]), x.repeat(kind[1])[: 13 * kind[1]].view(13, kind[1])])
    check_blocks(rows[~rows.isinf().any(1)], kind)
    check_blocks(rows, kind)


def test_the_scale_of_mx():
    """OCP MX v1.0, section 6.3: the largest power of two at or below amax, over that of the format."""
    for amax, wanted in ((448.0, 1.0), (511.0, 1.0), (512.0, 2.0), (255.0, 0.5), (1.0, 2.0**-8), (0.0, 2.0**-126)):
        x = torch.zeros(32)
        x[17] = -amax
        y, scales, _ = native.fake_quant_block(x, "e4m3", 32, "e8m0")
        assert scales.tolist() == [wanted]
        assert y[17] == -min(amax, 448 * wanted)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_of_mx_with_a_value_that_is_not_finite_is_nan(bad: float, format: str) -> None:
    """As in microxcaling, whose test of corners expects the same; its neighbours keep their values."""
    for place in (0, 7, 17, 31):
        x = torch.ones(3, 32)
        x[1, place] = bad
        y, scales, _ = native.fake_quant_block(x, format, 32, "e8m0")
        assert y[1].isnan().all()
        assert scales[1].isnan().all()
        assert torch.equal(y[[0, 2]], x[[0, 2]])


def test_the_scale_of_nvfp4():
    x = torch.randn(8, 64, generator=generator(0))
    tensor_scale = x.abs().max() / (448 * 6)
    _, scales, _ = native.fake_quant_block(x, "e2m1", 16, "e4m3", tensor_scale)
    codes = (x.view(8, 4, 16).abs().amax(-1) / 6 / tensor_scale).clamp(max=448).to(torch.float8_e4m3fn)
    assert_same(scales, codes.float() * tensor_scale)


@kinds
def test_opcheck_of_blocks(kind):
    for x in (spread(torch.float32)(4, 2 * kind[1]), spread(torch.bfloat16)(2 * kind[1], 3).t()):
        torch.library.opcheck(native.fake_quant_block.default, (leaf(x), *kind))
    torch.library.opcheck(native.fake_quant_block.default, (x, *kind, None, True))


def test_compile_of_blocks():
    def step(x: Tensor) -> Tensor:
        return (ops.fake_quant_block(x, "e4m3") * 2).relu()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((2, 64), (5, 96)):
        x, y = (leaf(floats(torch.float32)(*sizes)) for _ in range(2))
        compiled(x).sum().backward()
        step(y).sum().backward()
        assert_same(compiled(x), step(y))
        assert_same(x.grad, y.grad)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"format": "e8m0"}, ValueError, "format must be 'e4m3', 'e5m2' or 'e2m1', got 'e8m0'."),
        ({"format": "nnie"}, ValueError, "format must be 'e4m3', 'e5m2' or 'e2m1', got 'nnie'."),
        ({"scale_format": "e5m2"}, ValueError, "scale_format must be 'e8m0' or 'e4m3', got 'e5m2'."),
        ({"block_size": 24}, ValueError, "block_size must be a multiple of 16 up to 1024, got 24."),
        ({"block_size": 48}, ValueError, "must divide the last dimension of x, got block_size=48 and shape [4, 64]"),
        ({"x": torch.ones(())}, ValueError, "must divide the last dimension of x, got block_size=32 and shape []"),
        ({"tensor_scale": torch.ones(())}, ValueError, "tensor_scale requires scale_format='e4m3', got 'e8m0'"),
        (
            {"tensor_scale": torch.ones(2), "scale_format": "e4m3"},
            ValueError,
            "tensor_scale must have 1 element if axis is None, got 2",
        ),
        (
            {"tensor_scale": torch.ones((), requires_grad=True), "scale_format": "e4m3"},
            NotImplementedError,
            "pass tensor_scale.detach().",
        ),
    ],
)
def test_errors_of_blocks(change, error, sentence, device):
    given = {"x": torch.ones(4, 64), "format": "e4m3"} | change
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(error) as raised:
        ops.fake_quant_block(**given)
    assert str(raised.value).startswith("fake_quant_block: ")
    assert sentence in str(raised.value)


# ---- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"format": "e3m4"}, ValueError, "format must be 'e4m3', 'e5m2', 'e2m1' or 'nnie', got 'e3m4'."),
        ({"x": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "x must be float32, float64, bfloat16 or float16"),
        ({"scale": torch.ones(5)}, ValueError, "scale must have 1 or 6 elements (x.size(1)), got 5 (shape [5])."),
        (
            {"scale": torch.ones(6, dtype=torch.int32)},
            TypeError,
            "scale must be float32, float64, bfloat16 or float16, got Int",
        ),
        ({"axis": 2}, ValueError, "axis must lie in [-2, 1] for an input of 2 dimensions, got 2."),
        ({"group": 3}, ValueError, "group must divide x.size(0) = 4, got 3."),
        ({"scale": torch.ones(6, requires_grad=True)}, NotImplementedError, "pass scale.detach()."),
    ],
)
def test_errors(change, error, sentence, device):
    given = {"x": torch.ones(4, 6), "scale": torch.ones(6), "format": "e4m3", "axis": 1} | change
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(error) as raised:
        ops.fake_quant_float(**given)
    assert str(raised.value).startswith("fake_quant_float: ")
    assert sentence in str(raised.value)
