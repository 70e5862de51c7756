"""fake_quant_float: against ml_dtypes and torch's own casts on every 16-bit number, and against the oracle. All exact."""

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
    assert_laid_out_as,
    assert_same,
    floats,
    layout_cases,
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
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


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


@formats
@dtypes
def test_special_values(format, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(20)
    for scale in (1.0, 0.1, 1e-38, 1e-45, 0.0, 1e38, -2.0, torch.inf, torch.nan):
        check(x, torch.tensor(scale), format)


def test_what_saturates():
    x = torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan])
    for format, most in LARGEST.items():
        assert_same(ops.fake_quant_float(x, ONE, format), torch.tensor([most, -most, most, torch.nan]))


@formats
@dtypes
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_layouts(layout, channels, dtype, format):
    x = layout(floats(dtype))
    check(x, scales(channels.count(x)), format, channels)


@formats
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_channel_runs(run, format):
    for group in (1, run[0]):
        channels, x = Channels(1, group), floats(torch.bfloat16)(*run)
        check(x, scales(channels.count(x)), format, channels)


@formats
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, format):
    check(floats(torch.float32)(size), scales(1), format)


def test_float64_is_rounded_once():
    """By way of float32, which would round it to a tie, it would come out as 1."""
    x = torch.tensor([1.0625 + 2.0**-40, 1.0625, 1.0625 - 2.0**-40], dtype=torch.float64)
    assert ops.fake_quant_float(x, ONE, "e4m3").tolist() == [1.125, 1.0, 1.0]


# ---- gradients --------------------------------------------------------------------------------------------------------


@formats
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
        "masked": (x, scales(1), "e2m1", None, 1, True),
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


@formats
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


# ---- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"format": "e3m4"}, ValueError, "format must be 'e4m3', 'e5m2' or 'e2m1', got 'e3m4'."),
        ({"x": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "x must be float32, float64, bfloat16 or float16"),
        ({"scale": torch.ones(5)}, ValueError, "scale must have 1 or 6 elements (x.size(1)), got 5 (shape [5])."),
        ({"scale": torch.ones(6, dtype=torch.int32)}, TypeError, "scale must be a floating point tensor, got Int"),
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
