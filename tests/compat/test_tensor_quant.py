"""compat.pytorch_quantization.tensor_quant: the functions against the oracle, the descriptors against their rules."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from qtoolkit.compat.pytorch_quantization import tensor_quant as tq
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from tests import reference
from tests.cases import FLOATS, assert_same, leaf, name_of

X = [0.5043, 0.8178, 0.4798, 0.9201, 0.6819, 0.6900, 0.6925, 0.3804, 0.4479, 0.4954]
PUBLISHED = [0.5071, 0.8187, 0.4782, 0.9201, 0.6810, 0.6883, 0.6955, 0.3840, 0.4492, 0.4927]
GRIDS = [(8, False, True), (8, False, False), (8, True, True), (4, False, False), (1, True, True), (20, False, True)]
AMAX = {
    "tensor": torch.tensor(1.7),
    "one element": torch.full((1, 1, 1), 1.7),
    "channel": torch.tensor([[[0.0]], [[0.4]], [[2.0]]]),
    "two axes": torch.linspace(0, 3, 12).reshape(3, 1, 4),
}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
ways = pytest.mark.parametrize("way", [tq.fake_tensor_quant, tq.legacy_fake_tensor_quant], ids=["op", "legacy"])


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.view(-1)[:3] = torch.tensor([1.7, -1.7, 0.0])
    return x.to(dtype)


@ways
def test_the_published_numbers_come_out(way):
    x = torch.tensor(X)
    assert [f"{v:.4f}" for v in way(x, x.abs().max()).tolist()] == [f"{v:.4f}" for v in PUBLISHED]


@dtypes
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("amax", AMAX.values(), ids=AMAX)
def test_values_and_gradients_are_the_oracles(dtype, grid, amax):
    x = leaf(values(dtype).abs() if grid[1] else values(dtype))
    codes, scale, wanted, inside = reference.tensor_quant(x, amax, *grid)
    if torch.isfinite(scale).all():
        ours, multiplier = tq.tensor_quant(x, amax, *grid)
        assert_same(ours, codes)
        assert_same(multiplier, scale)
    for way in (tq.fake_tensor_quant, tq.legacy_fake_tensor_quant):
        x.grad = None
        y = way(x, amax, *grid)
        y.backward(torch.full_like(y, 3.0))
        assert_same(y, wanted)
        assert torch.equal(x.grad, 3 * inside.to(dtype))


def test_the_gradient_of_codes_passes_inside_the_range_alone():
    for amax in (torch.tensor(1.0), torch.ones(2, 2)):
        x = leaf(torch.tensor([[1.0, -1.0], [1.5, 0.2]]))
        tq.tensor_quant(x, amax)[0].sum().backward()
        assert x.grad.tolist() == [[1, 1], [0, 1]]


@ways
def test_defaults_are_signed_and_narrow(way):
    x = torch.tensor([-9.0, 9.0])
    assert way(x, torch.tensor(1.0)).tolist() == [-1, 1]
    assert way(x, torch.tensor(127.0 / 128), 8, False, False)[0] == -1


@ways
def test_amax_may_be_a_number(way):
    assert torch.equal(way(values(), 1.7), way(values(), torch.tensor(1.7)))


@ways
@pytest.mark.parametrize("amax", [2.0**-24, 0.0])
def test_tiny_ranges_give_zeros(way, amax):
    assert torch.equal(way(values(), torch.tensor(amax)), torch.zeros(3, 5, 4))


def test_a_tiny_range_has_the_multiplier_one():
    for amax in (torch.tensor(2.0**-24), torch.zeros(3, 5, 1)):
        codes, scale = tq.tensor_quant(values(), amax)
        assert not codes.any()
        assert torch.equal(scale, torch.ones_like(amax))


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_sign_errors(shape):
    x, one = torch.tensor([[-1.0, 1.0], [0.0, 2.0]]), torch.ones(shape)
    for f in (tq.tensor_quant, tq.fake_tensor_quant, tq.legacy_fake_tensor_quant):
        with pytest.raises(TypeError, match="Negative values encountered in unsigned quantization."):
            f(x, one, 8, True)
        with pytest.raises(ValueError, match="Negative values in amax"):
            f(x, -one)
    with pytest.raises(ValueError, match="Negative values in amax"):
        tq.scaled_e4m3(x, -one)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(), (2, 1), (2, 2)])
def test_an_amax_that_is_not_finite_raises(shape, bad):
    x, amax = torch.tensor([[-1.0, 1.0], [0.0, 2.0]]), torch.full(shape, bad)
    for f in (tq.tensor_quant, tq.fake_tensor_quant, tq.legacy_fake_tensor_quant, tq.scaled_e4m3):
        with pytest.raises(ValueError, match="NaN or infinities in amax"):
            f(x, amax)
    assert tq.fake_tensor_quant(x * torch.nan, torch.tensor(torch.nan)).isnan().all()


@pytest.mark.parametrize("blocks", [(1, 3), (2, 3), (2, 1)])
def test_two_dimensional_blocks_by_a_view_of_the_matrix(blocks):
    """A range for each block of a matrix: the functions take an amax along several dimensions of a reshaped input."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tiles = x.reshape(4 // blocks[0], blocks[0], 6 // blocks[1], blocks[1])
    y = tq.fake_tensor_quant(tiles, tiles.abs().amax((1, 3), keepdim=True), 4).reshape(4, 6)
    for row in range(0, 4, blocks[0]):
        for column in range(0, 6, blocks[1]):
            tile = (slice(row, row + blocks[0]), slice(column, column + blocks[1]))
            assert_same(y[tile], reference.tensor_quant(x[tile], x[tile].abs().max(), 4, False, True)[2])


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_a_multiplier_beyond_float16_is_an_error(shape):
    with pytest.raises(ValueError, match="scale is too large for FP16 with amax="):
        tq.tensor_quant(torch.ones(2, 2).half(), torch.full(shape, 1e-3))
    assert tq.fake_tensor_quant(torch.ones(2, 2).half(), torch.full(shape, 1e-3)).dtype == torch.float16


@pytest.mark.parametrize("bits", [0, -3])
def test_bits_below_one_are_an_error(bits):
    for f in (tq.tensor_quant, tq.fake_tensor_quant, tq.legacy_fake_tensor_quant):
        with pytest.raises(ValueError, match=f"num_bits must be 1 or more, got {bits}"):
            f(values(), torch.tensor(1.0), bits)
    with pytest.raises(ValueError, match="num_bits must be 1 or more"):
        tq.fake_affine_tensor_quant(values(), -1.0, 1.0, bits)


# ---- affine and E4M3


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("ends", [(-1.0, 2.0), (0.25, 0.75), (-0.1, 0.0)])
def test_affine_is_its_formula(bits, ends):
    x = leaf(values())
    y = tq.fake_affine_tensor_quant(x, torch.tensor(ends[0]), torch.tensor(ends[1]), bits)
    y.sum().backward()
    low, high = (np.float32(end) for end in ends)
    step = (high - low) / np.float32(2**bits - 1)
    minb = -(2 ** (bits - 1))
    zero = np.rint(low / step) - minb
    v = x.detach().numpy()
    q = np.clip(np.rint(v / step) - zero, minb, -minb - 1)
    assert np.array_equal(y.detach().numpy(), ((q + zero) * step).astype(np.float32))
    assert np.array_equal(x.grad.numpy(), ((low <= v) & (v <= high)).astype(np.float32))
    assert tq.fake_affine_tensor_quant(x.half(), *ends, bits).dtype == torch.float16


def test_an_affine_range_must_not_be_empty():
    with pytest.raises(ValueError, match="max_range must be above min_range"):
        tq.fake_affine_tensor_quant(values(), 1.0, 1.0)


@pytest.mark.parametrize("amax", [None, 1.7, AMAX["tensor"], AMAX["two axes"][1:2]], ids=str)
def test_e4m3_is_torchs_cast(amax):
    x = leaf(values() * (300 if amax is None else 1))
    y = tq.scaled_e4m3(x, amax)
    y.sum().backward()
    largest = torch.as_tensor(448.0 if amax is None else amax)
    scale = 448 / largest
    wanted = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    assert torch.equal(y, wanted.masked_fill(x.abs() < 2**-24, 0))
    assert torch.equal(x.grad, (x.abs() <= largest).float())


def test_e4m3_of_little_is_zero():
    assert tq.scaled_e4m3(torch.tensor([2.0**-25, 2.0**-24]), 2.0**-20).tolist() == [0, 2.0**-24]
    assert tq.scaled_e4m3(torch.ones(2), torch.tensor([0.0, 1.0])).tolist() == [0, 1]


def test_other_float_formats_are_refused():
    with pytest.raises(NotImplementedError, match="E, M must be 4, 3, got 5, 2"):
        tq.scaled_e4m3(values(), None, 5, 2)


# ---- descriptors

SOME = {
    "default": {},
    "positional": {"num_bits": 4, "name": "a"},
    "axis": {"axis": 0},
    "axes": {"axis": (0, -1), "narrow_range": True, "calib_method": "histogram"},
    "float8": {"num_bits": (4, 3), "amax": 1.5, "scale_amax": 0.5},
    "array": {"amax": np.array([0.1, 2.0]), "unsigned": True, "fake_quant": False},
    "learned": {"learn_amax": True},
}
some = pytest.mark.parametrize("fields", SOME.values(), ids=SOME)


def test_defaults_of_a_descriptor():
    desc = tq.ScaledQuantDescriptor()
    assert tq.ScaledQuantDescriptor is QuantDescriptor
    assert (desc.num_bits, desc.name, desc.fake_quant, desc.axis, desc.amax) == (8, None, True, None, None)
    assert (desc.learn_amax, desc.scale_amax, desc.calib_method) == (False, None, "max")
    assert (desc.unsigned, desc.narrow_range) == (False, False)
    assert desc.dict() == {}
    with pytest.raises(AttributeError):
        desc.num_bits = 4


@some
def test_dict_holds_what_makes_a_descriptor(fields):
    desc = QuantDescriptor(**fields)
    assert desc.dict().keys() == fields.keys()
    assert QuantDescriptor(**desc.dict()) == desc == deepcopy(desc)
    assert hash(QuantDescriptor(**desc.dict())) == hash(desc)
    assert all(desc != QuantDescriptor(**other) for other in SOME.values() if other is not fields)


@some
def test_yaml_holds_it_too(fields):
    pytest.importorskip("yaml")
    desc = QuantDescriptor(**fields)
    assert QuantDescriptor.from_yaml(desc.to_yaml()) == desc


def test_yaml_of_something_else():
    pytest.importorskip("yaml")
    with pytest.raises(TypeError, match="must hold a mapping, got a list"):
        QuantDescriptor.from_yaml("[8]")


def test_without_yaml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        QuantDescriptor().to_yaml()


@pytest.mark.parametrize("amax", [2.0, [1.0, 2.0], np.array([[3.0]])], ids=str)
def test_amax_becomes_a_float32_array(amax):
    desc = QuantDescriptor(amax=amax)
    assert desc.amax.dtype == np.float32
    assert np.array_equal(desc.amax, amax)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"num_bits": -1}, ValueError, "num_bits must be > 0, got -1"),
        ({"num_bits": 0}, ValueError, "num_bits must be > 0, got 0"),
        ({"num_bits": (5, 2)}, TypeError, r"must be an int or \(4, 3\), got \(5, 2\)"),
        ({"num_bits": 8.0}, TypeError, "must be an int"),
        ({"name": 3}, TypeError, "name must be a string or None, got an int"),
        ({"learn_amax": True, "axis": 0}, TypeError, "axis is ignored and must be None when learn_amax is true, got 0"),
        ({"amax": 3}, TypeError, "amax must be float, list or ndarray"),
        ({"axis": "0"}, TypeError, "axis must be an int"),
        ({"calib_method": "histgoram"}, ValueError, "did you mean 'histogram'"),
        ({"bits": 8}, TypeError, "Unused keys: bits. Known: num_bits, name"),
        (
            {"block_sizes": {-1: 16}},
            TypeError,
            r"Unused keys: block_sizes.*for blocks, use qtoolkit.QuantSpec\(group_size",
        ),
        ({"amax": float("nan")}, ValueError, "amax must not be NaN, got nan"),
    ],
)
def test_descriptor_errors(fields, error, words):
    with pytest.raises(error, match=words):
        QuantDescriptor(**fields)


def test_predefined_descriptors():
    assert QuantDescriptor() == tq.QUANT_DESC_8BIT_PER_TENSOR
    assert QuantDescriptor(unsigned=True) == tq.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR
    assert QuantDescriptor(axis=0) == tq.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW
    for dims in (1, 2, 3):
        assert getattr(tq, f"QUANT_DESC_8BIT_CONV{dims}D_WEIGHT_PER_CHANNEL").dict() == {"axis": 0}
        assert getattr(tq, f"QUANT_DESC_8BIT_CONVTRANSPOSE{dims}D_WEIGHT_PER_CHANNEL").dict() == {"axis": 1}
