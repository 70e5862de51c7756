"""Every 16-bit number through every grid, and tensors of more elements than an int counts. All comparisons are exact."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import Channels, assert_same, floats, generator, name_of, scales, zero_points
from tests.ops import test_float_formats
from tests.ops import test_legacy as test_legacy_ops
from tests.ops.test_float_formats import all_formats, every, kinds

native = torch.ops.qtoolkit
SCALES = torch.tensor([0.1, 2**-7, 1e-6, 3e-8, 700.0, 1e-3, 1.0, 1 / 3])
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
all_bits = pytest.mark.parametrize("bits", range(2, 9))


def on_each_scale(dtype: torch.dtype) -> Tensor:
    return every(dtype).expand(len(SCALES), -1).contiguous()


# ---- every 16-bit number --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "affine"])
@pytest.mark.parametrize("kind", ["signed", "narrow", "unsigned"])
@all_bits
@halves
def test_integer_grids(dtype: torch.dtype, bits: int, kind: str, affine: bool) -> None:
    low = 0 if kind == "unsigned" else -(2 ** (bits - 1)) + (kind == "narrow")
    high = 2**bits - 1 if kind == "unsigned" else 2 ** (bits - 1) - 1
    x, zero_point = on_each_scale(dtype), zero_points(len(SCALES), low=low, high=high + 1) if affine else None
    wanted = reference.Snapped(x, SCALES, zero_point, low, high, axis=0)
    inside = torch.from_numpy(wanted.inside)
    y, mask = native.fake_quant(x, SCALES, zero_point, low, high, 0, mask=True)
    assert_same(y, reference.tensor(wanted.values(), dtype))
    assert torch.equal(mask, reference.packed(inside, y))
    codes = ops.quantize(x, SCALES, zero_point, low, high, axis=0, dtype=torch.int16)
    assert_same(codes, reference.tensor(wanted.codes(), torch.int16))
    assert_same(native.fake_quant_backward(torch.ones_like(x), mask, []), inside.to(dtype))


@all_formats
@halves
def test_float_formats_on_every_scale(dtype: torch.dtype, format: str) -> None:
    test_float_formats.check(on_each_scale(dtype), SCALES, format, Channels(0))


@kinds
@halves
def test_block_formats(dtype: torch.dtype, kind: tuple) -> None:
    """Blocks of neighbours in magnitude, and of numbers from all over."""
    x = every(dtype)[: 65536 // kind[1] * kind[1]]
    mixed = x[torch.randperm(len(x), generator=generator(0))]
    for values in (x, mixed, mixed.nan_to_num(0, 1, -1)):
        test_float_formats.check_blocks(values.view(-1, kind[1]), kind)


@pytest.mark.parametrize(("unsigned", "narrow"), [(False, True), (False, False), (True, True)])
@all_bits
@halves
def test_legacy_grids(dtype: torch.dtype, bits: int, unsigned: bool, narrow: bool) -> None:
    test_legacy_ops.check(on_each_scale(dtype), SCALES[:, None] * 100, (bits, unsigned, narrow))


# ---- more than 2^31 elements: one row, read again and again, so that the input takes no memory ----------------------

ROWS, COLUMNS = 32_800, 65_520  # 2^31 lies within a row
SOME_ROWS = (0, 2**31 // COLUMNS - 1, 2**31 // COLUMNS, ROWS - 1)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture
def _memory() -> None:
    if available_bytes() < 7 * 2**30:
        pytest.skip("less than 7 GiB of memory is available")


def repeated(row: Tensor) -> Tensor:
    x = row.expand(ROWS, COLUMNS)
    assert x.numel() > 2**31
    return x


def assert_rows(y: Tensor, row: Tensor) -> None:
    for part in y.split(1024):
        assert torch.equal(part, row.expand_as(part))


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("axis", [pytest.param(None, marks=pytest.mark.sweep), 1])
@pytest.mark.slow
def test_quantize_more_than_an_int_counts(axis: int | None) -> None:
    row, count = floats(torch.bfloat16)(COLUMNS), 1 if axis is None else COLUMNS
    q = ops.quantize(repeated(row), scales(count), zero_points(count), axis=axis)
    assert_rows(q, ops.quantize(row[None], scales(count), zero_points(count), axis=axis)[0])


@pytest.mark.sweep
@pytest.mark.usefixtures("_memory")
def test_quantize_more_than_an_int_counts_with_a_scale_a_row() -> None:
    row, scale = floats(torch.bfloat16)(COLUMNS), scales(ROWS)
    q = ops.quantize(repeated(row), scale, axis=0)
    for at in SOME_ROWS:
        assert_same(q[at], ops.quantize(row, scale[at]))


@pytest.mark.sweep
@pytest.mark.usefixtures("_memory")
def test_fake_quant_and_its_gradient_of_more_than_an_int_counts() -> None:
    row, grid = floats(torch.bfloat16)(COLUMNS), (scales(1), None, -100, 90, None, 1, 0, 1.0, True)
    y, mask = native.fake_quant(repeated(row), *grid)
    wanted, bits = native.fake_quant(row, *grid)
    assert_rows(y, wanted)
    assert_rows(mask.view(ROWS, -1), bits)
    del y
    grad = floats(torch.bfloat16, 7)(COLUMNS)
    dx = native.fake_quant_backward(repeated(grad), mask, [])
    assert_rows(dx, native.fake_quant_backward(grad, bits, []))


@pytest.mark.sweep
@pytest.mark.usefixtures("_memory")
def test_learned_gradients_of_more_than_an_int_counts() -> None:
    """Dyadic numbers, so that all sums are exact: they are those of a row, times the rows."""
    row = torch.randint(-600, 600, (COLUMNS,), generator=generator(0)).bfloat16() / 32
    grad, grid = (
        torch.ones(COLUMNS, dtype=torch.bfloat16),
        (torch.tensor(0.125).double(), torch.zeros(()).double(), -9, 7),
    )
    dx, *sums = native.fake_quant_learned_backward(repeated(grad), repeated(row), *grid)
    one, *wanted = native.fake_quant_learned_backward(grad, row, *grid)
    assert_rows(dx, one)
    for total, of_a_row in zip(sums, wanted, strict=True):
        assert total == of_a_row * ROWS != 0


@pytest.mark.slow
def test_ranges_and_counts_of_more_than_an_int_counts() -> None:
    """Nothing is written, so no memory is needed."""
    row = floats(torch.bfloat16)(COLUMNS)
    for got, wanted in zip(ops.minmax(repeated(row)), ops.minmax(row), strict=True):
        assert_same(got, wanted)
    found, one = ([torch.zeros(64, dtype=torch.int64), torch.zeros(()), torch.zeros(())] for _ in range(2))
    ops.observe_histogram_(repeated(row), *found)
    ops.observe_histogram_(row, *one)
    assert torch.equal(found[0], one[0] * ROWS)
    assert found[1:] == one[1:]
