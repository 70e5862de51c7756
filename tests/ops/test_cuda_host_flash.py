"""CUDA's attention without scores in memory executed on the CPU (see cuda_host), in three orders of its threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import assert_same, floats, leaf, name_of
from tests.ops import units
from tests.ops.cuda_host import ORDERS, compiled, on_host
from tests.ops.test_attention import GRIDS, QMAX, QMIN, by_op, gradients, grid_of, one_by_one, operands

HALVES = [torch.bfloat16, torch.float16]
# Batch, queries, keys, features of query and key, of the value: parts of tiles and several of them, each width of the
# kernels and rows that begin at any element.
SHAPES = [
    *(((3,), 5, 7, 4, 6), ((2, 3), 70, 100, 64, 64), ((2,), 130, 33, 32, 24), ((1,), 40, 90, 128, 100)),
    *(((2, 1, 2), 1, 1, 8, 8), ((1,), 65, 129, 17, 33)),
]
MASKS = {
    "none": None,
    "keys": lambda batch, queries, keys: (*batch[:1], *[1] * len(batch), keys),
    "places": lambda batch, queries, keys: (queries, keys),
    "all": lambda batch, queries, keys: (*batch, queries, keys),
}


def masks(kind: str, shape: tuple, dtype: torch.dtype) -> Tensor | None:
    """A mask, with minus infinity for one key."""
    if MASKS[kind] is None:
        return None
    mask = floats(torch.float32, 5)(*MASKS[kind](*shape[:3])) / 4
    if shape[2] > 1:
        mask[..., -1] = -torch.inf
    return mask.to(dtype)


def in_float64(values: dict, kind: str, mask: Tensor | None, weight: Tensor, **kept: Any) -> list[Tensor]:
    """The result and the gradients of the ops one by one."""
    values, grid = {name: leaf(value.detach().double()) for name, value in values.items()}, grid_of(kind, torch.float64)
    y = one_by_one(values, grid, None if mask is None else mask.double(), torch.float64, **kept)
    leaves = [t for t in (*values.values(), *grid.values()) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, weight.double())]


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Up to the rounding of operands to 16 bits, and to codes that differ by one where a weight is between two."""
    error, eps = (found.double() - wanted).abs(), torch.finfo(dtype).eps
    assert error.mean() <= eps * wanted.abs().mean() + 1e-6
    assert error.max() <= max(0.004, 2 * eps) * wanted.abs().max() + 1e-6


def causal_summand(shape: tuple) -> Tensor:
    return torch.full(shape[1:3], -torch.inf).triu(1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, codes, causal, mask, kind, dtype) -> None:
    """Those of float64; the same bits in each order, within the tensors, in one launch forward and two backward."""
    values = {name: leaf(value) for name, value in operands(shape, torch.float32).items()}
    added = masks(mask, shape, torch.float32 if codes else dtype)
    found: dict[str, list[Tensor]] = {}
    for order in ORDERS:
        grid = grid_of(kind, torch.float32)
        with on_host(order):
            compiled().launches()
            y = by_op(values, grid, added, dtype, codes, causal=causal)
            assert compiled().launches() == 1
            found[order] = [y.detach().clone(), *(g.clone() for g in gradients(y, values, grid))]
            assert compiled().launches() == 2
        for one, other in zip(found[order], found["forwards"], strict=True):
            assert_same(one, other)
    hidden = causal_summand(shape) if causal else None
    both = hidden if added is None else added.double() if hidden is None else added + hidden
    weight = (floats(dtype, 9)(*y.shape) / 10).to(dtype)
    for one, wanted in zip(found["forwards"], in_float64(values, kind, both, weight), strict=True):
        assert_near(one, wanted, dtype)


def splitmix(seed: int, count: int) -> Tensor:
    """The upper 32 bits of the first numbers of SplitMix64 with a seed."""
    found = []
    for place in range(count):
        bits = (seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        found.append((bits ^ bits >> 31) >> 32)
    return torch.tensor(found)


def dropped(seed: int | None, p: float, **others: Any) -> list[Tensor]:
    """The result of an attention with dropout, its gradients, and the seed of its numbers."""
    shape = SHAPES[1]
    values = {name: leaf(value) for name, value in operands(shape, torch.float32).items()}
    grid = grid_of("learned", torch.float32)
    if seed is not None:
        torch.manual_seed(seed)
    known = {f"{name}_{part}": None for name in values for part in ("codes", "scale", "zero_point")}
    given = {**values, **known, "mask": None, "dtype": torch.bfloat16, "keeps_softmax": False, "causal": False}
    given |= {f"weights_{name}": value for name, value in grid.items()}
    given |= {"weights_qmin": QMIN, "weights_qmax": QMAX, "weights_grad_factor": 0.5, "weights_float16": False}
    y, *_, of_dropout = units.call("attention_fake_quant", **{**given, "dropout": p, "learned": True, **others})
    return [y.detach(), *gradients(y, values, grid), of_dropout]


def test_dropout_multiplies_the_rounded_weights() -> None:
    """By the numbers of a seed, in forward and in backward."""
    with on_host("forwards"):
        *found, seed = dropped(3, 0.3)
    batch, queries, keys, *_ = shape = SHAPES[1]
    kept = splitmix(int(seed), 6 * queries * keys) >= 0.3 * 2**32
    assert abs(float(kept.double().mean()) - 0.7) < 0.01
    values = operands(shape, torch.float32)
    weight = (floats(torch.bfloat16, 9)(*found[0].shape) / 10).to(torch.bfloat16)
    wanted = in_float64(values, "learned", None, weight, kept=kept.double().view(*batch, queries, keys) / 0.7)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, torch.bfloat16)


def test_dropout_follows_torchs_generator() -> None:
    with on_host("forwards"):
        first, again, other = dropped(1, 0.5), dropped(1, 0.5), dropped(None, 0.5)
    for one, two in zip(first, again, strict=True):
        assert_same(one, two)
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p) -> None:
    with on_host("forwards"):
        y, *grads, _ = dropped(1, p)
    assert bool(y.any()) == (p == 0)
    assert all(bool(g.any()) == (p == 0) for g in grads)


def test_dropout_where_no_kernel_drops() -> None:
    values = operands(SHAPES[0], torch.float32).values()
    fits = torch.classes.qtoolkit.AttentionUnit.fits_dropout
    assert not fits(*values, None, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="dropout must be 0 where fits_dropout"):
        dropped(1, 0.3)
    with on_host("forwards"):
        assert fits(*values, None, torch.bfloat16)
        assert not fits(*values, None, torch.float32)
        with pytest.raises(ValueError, match="dropout must be a probability from 0 to 1, got 1.5"):
            dropped(1, 1.5)


def test_rows_that_are_masked_or_not_numbers() -> None:
    """As torch: a query all of whose keys are masked gives NaN, and so does a score that is NaN or plus infinity."""
    values = operands(((2,), 70, 40, 16, 16), torch.float32)
    mask = torch.zeros(70, 40)
    mask[3], mask[5, 7], mask[66, 39], mask[9, 2] = -torch.inf, torch.nan, torch.inf, -torch.inf
    values["v"][1, 8] = torch.inf
    with on_host("forwards"):
        y = by_op(values, grid_of("fixed", torch.float32), mask, torch.bfloat16, codes=False)
    wanted = one_by_one(values, grid_of("fixed", torch.float32), mask, torch.bfloat16)
    assert_same(y[0].isnan(), wanted[0].isnan())
    assert y[0].isnan().all(-1).nonzero().flatten().tolist() == [3, 5, 66]
    assert not y[1].isfinite().any()


def test_a_grid_without_zero_under_a_causal_mask() -> None:
    """A weight of zero is clipped to a value that is not, also behind the query."""
    shape = ((2,), 100, 130, 16, 16)
    values = {name: leaf(value) for name, value in operands(shape, torch.float32).items()}
    weight = (floats(torch.bfloat16, 9)(2, 100, 16) / 10).to(torch.bfloat16)
    found, wanted = [], []
    for dtype in (torch.float32, torch.float64):
        grid = {**grid_of("affine", dtype), "zero_point": leaf(torch.tensor(-20.0, dtype=dtype))}
        if dtype == torch.float32:
            with on_host("forwards"):
                y = by_op(values, grid, None, torch.bfloat16, causal=True)
                found = [y, *gradients(y, values, grid)]
        else:
            wide = {name: leaf(value.detach().double()) for name, value in values.items()}
            y = one_by_one(wide, grid, causal_summand(shape).double(), dtype)
            leaves = [*wide.values(), *(t for t in grid.values() if t is not None and t.requires_grad)]
            wanted = [y, *torch.autograd.grad(y, leaves, weight.double())]
    for one, other in zip(found, wanted, strict=True):
        assert_near(one.detach(), other.detach(), torch.bfloat16)


@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, 64), (torch.bfloat16, 129)], ids=str)
def test_others_write_their_scores(dtype, features) -> None:
    """float32, and heads that are too wide: products of torch, and a kernel between them, which follow a causal mask too."""
    shape = ((2,), 20, 30, features, 16)
    values = {name: leaf(value) for name, value in operands(shape, torch.float32).items()}
    grid = grid_of("learned", torch.float32)
    with on_host("forwards"):
        y = by_op(values, grid, None, dtype, causal=True)
        found = [y.detach(), *gradients(y, values, grid)]
    weight = (floats(dtype, 9)(*y.shape) / 10).to(dtype)
    for one, other in zip(found, in_float64(values, "learned", causal_summand(shape), weight), strict=True):
        assert_near(one, other, torch.bfloat16)


def test_memory_is_linear_in_the_number_of_keys() -> None:
    """All launches together move less than one matrix of scores."""
    shape = ((1,), 512, 512, 8, 8)
    values = {name: leaf(value) for name, value in operands(shape, torch.float32).items()}
    with on_host("forwards"):
        compiled().count_bytes(True)
        y = by_op(values, grid_of("fixed", torch.float32), None, torch.bfloat16)
        gradients(y, values, {})
        moved = compiled().count_bytes(False)
    assert moved < 512 * 512 * 2 / 4
