"""attention_fake_quant: the values and gradients of its ops one by one, what it keeps for backward, its errors."""

import itertools

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests.cases import FLOATS, assert_same, floats, leaf, name_of
from tests.ops import units

QMIN, QMAX = 0, 200
SHAPES = [((3,), 5, 7, 4, 6), ((2, 3), 1, 1, 8, 8), ((2, 2, 1), 9, 3, 2, 1), ((1,), 4, 300, 8, 4)]
GRIDS = ("none", "fixed", "learned", "affine")


def operands(shape: tuple, dtype: torch.dtype) -> dict[str, Tensor]:
    """Query, key and value on grids with a step of 1/8."""
    batch, target, source, features, of_value = shape
    sizes = {"q": (target, features), "k": (source, features), "v": (source, of_value)}
    return {
        name: (floats(dtype, seed)(*batch, *size).float() / 3).round().clamp(-40, 40).div(8).to(dtype)
        for seed, (name, size) in enumerate(sizes.items())
    }


def codes_of(values: dict[str, Tensor]) -> dict[str, Tensor | None]:
    found = {}
    for name, value in values.items():
        found |= {f"{name}_codes": (value.detach() * 8).round().to(torch.int8), f"{name}_zero_point": None}
        found[f"{name}_scale"] = torch.tensor(0.125, device=value.device)
    return found


def grid_of(kind: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    none = {"start": None, "ratio": None, "rate": None, "zero_point": None}
    if kind == "none":
        return none
    start, ratio = torch.tensor(0.004, dtype=wide), torch.tensor(0.9, dtype=wide)
    zero = torch.tensor(3.0, dtype=wide)
    return (
        none
        | {
            "fixed": {"start": start},
            "learned": {"start": start, "ratio": leaf(ratio), "rate": torch.tensor(0.5, dtype=wide)},
            "affine": {"start": leaf(start), "zero_point": leaf(zero)},
        }[kind]
    )


def by_op(
    values: dict[str, Tensor],
    grid: dict,
    mask: Tensor | None,
    dtype: torch.dtype,
    codes: bool = True,
    keeps: bool = False,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    known = codes_of(values) if codes else {}
    names = (f"{name}_{part}" for name in values for part in ("codes", "scale", "zero_point"))
    given = {
        **values,
        **{name: known.get(name) for name in names},
        "mask": mask,
        "dtype": dtype,
        "keeps_softmax": keeps,
        "causal": causal,
        "dropout": dropout,
    }
    given |= {f"weights_{name}": value for name, value in grid.items()}
    given |= {"weights_qmin": QMIN, "weights_qmax": QMAX, "weights_grad_factor": 0.5, "weights_float16": False}
    learned = any(t is not None and t.requires_grad for t in grid.values())
    return units.call("attention_fake_quant", **given, learned=learned)[0]


def one_by_one(
    values: dict[str, Tensor],
    grid: dict,
    mask: Tensor | None,
    dtype: torch.dtype,
    kept: Tensor | None = None,
) -> Tensor:
    """The ops that torch and the package have, as nn.MultiheadAttention calls them; weights are multiplied by `kept`."""
    q, k, v = (value.to(dtype) for value in values.values())
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores if mask is None else scores + mask
    weights = scores.softmax(-1, torch.float64 if dtype == torch.float64 else torch.float32)
    if grid["start"] is not None:
        scale = grid["start"]
        if grid["ratio"] is not None:
            scale = torch.ops.qtoolkit.positive_scale(scale, grid["ratio"], grid["rate"])
        weights = ops.fake_quant(weights, scale, grid["zero_point"], QMIN, QMAX, grad_factor=0.5)
    weights = weights.to(dtype)
    return torch.matmul(weights if kept is None else weights * kept, v)


def gradients(y: Tensor, values: dict[str, Tensor], grid: dict) -> list[Tensor]:
    leaves = [t for t in (*values.values(), *grid.values()) if t is not None and t.requires_grad]
    weight = floats(y.dtype, 9)(*y.shape) / 10
    return list(torch.autograd.grad(y, leaves, weight.to(y)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("codes", "masked", "keeps"), itertools.product([True, False], repeat=3))
def test_values_and_gradients_are_those_of_the_ops(shape, kind, dtype, codes, masked, keeps):
    """Bit for bit on a CPU."""
    values = {name: leaf(value) for name, value in operands(shape, dtype).items()}
    mask = floats(torch.float32, 5)(shape[1], shape[2]) if masked else None
    grid = grid_of(kind, dtype)
    found, wanted = by_op(values, grid, mask, dtype, codes, keeps), one_by_one(values, grid, mask, dtype)
    assert_same(found, wanted)
    for one, other in zip(gradients(found, values, grid), gradients(wanted, values, grid), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", GRIDS)
def test_it_computes_in_the_type_that_it_is_told(kind):
    values = {name: leaf(value) for name, value in operands(SHAPES[0], torch.float32).items()}
    grid = grid_of(kind, torch.float32)
    found, wanted = (f(values, grid, None, torch.bfloat16) for f in (by_op, one_by_one))
    assert found.dtype == torch.bfloat16
    assert_same(found, wanted)
    for one, other in zip(gradients(found, values, grid), gradients(wanted, values, grid), strict=True):
        assert one.dtype == torch.float32
        assert_same(one, other)


def test_backward_keeps_a_byte_for_each_element_of_the_operands():
    values = {name: leaf(value) for name, value in operands(((8,), 64, 96, 16, 24), torch.float32).items()}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()), lambda t: t
    ):
        by_op(values, grid_of("learned", torch.float32), None, torch.float32)
    elements = sum(value.numel() for value in values.values())
    assert sum(size for size in kept.values() if isinstance(size, int)) <= elements + 64


def test_gradients_that_nobody_asks_for():
    values = operands(SHAPES[0], torch.float32)
    values["k"] = leaf(values["k"])
    grid = grid_of("fixed", torch.float32)
    found, wanted = (f(values, grid, None, torch.float32) for f in (by_op, one_by_one))
    assert_same(*(gradients(y, values, grid)[0] for y in (found, wanted)))


WRONG = {
    "dimensions": ({"q": torch.zeros(5, 4)}, "attention_fake_quant: q must have at least 3 dimensions, got shape"),
    "batch": ({"k": torch.zeros(4, 7, 4)}, "q, k and v must have the same sizes in all dimensions but the last two"),
    "features": ({"k": torch.zeros(3, 7, 5)}, "q and k must have as many features, got 4 and 5"),
    "rows": ({"v": torch.zeros(3, 8, 6)}, "k and v must have as many rows, got 7 and 8"),
    "type": ({"q": torch.zeros(3, 5, 4, dtype=torch.int32)}, "q must be float32, float64, bfloat16 or float16"),
    "codes": ({"v_codes": torch.zeros(3, 7, 5, dtype=torch.int8), "v_scale": torch.ones(())}, "v_codes must have the"),
    "type of codes": (
        {"q_codes": torch.zeros(3, 5, 4), "q_scale": torch.ones(())},
        "q_codes must have an integer dtype",
    ),
    "scale of codes": ({"q_codes": torch.zeros(3, 5, 4, dtype=torch.int8)}, "q_codes require q_scale, got None"),
    "type of computation": ({"dtype": torch.int32}, "dtype must be float32, float64, bfloat16 or float16"),
    "dropout": ({"dropout": 1.5}, "dropout must be a probability from 0 to 1, got 1.5"),
    "ratio": ({"weights_ratio": torch.ones(())}, "requires its start, got None"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    given: dict = dict.fromkeys(f"{o}_{p}" for o in "qkv" for p in ("codes", "scale", "zero_point"))
    given |= operands(SHAPES[0], torch.float32) | {
        "mask": None,
        "dtype": torch.float32,
        "keeps_softmax": False,
        "causal": False,
        "dropout": 0.0,
        "learned": False,
    }
    given |= {f"weights_{name}": value for name, value in grid_of("none", torch.float32).items()}
    given |= {"weights_qmin": QMIN, "weights_qmax": QMAX, "weights_grad_factor": 1.0, "weights_float16": False}
    units.call("attention_fake_quant", **given)
    arguments, sentence = WRONG[wrong]
    with pytest.raises((ValueError, TypeError), match=sentence):
        units.call("attention_fake_quant", **{**given, **arguments})


def test_double_backward_is_refused():
    values = {name: leaf(value) for name, value in operands(SHAPES[0], torch.float32).items()}
    y = by_op(values, grid_of("fixed", torch.float32), None, torch.float32)
    (first,) = torch.autograd.grad(y.square().sum(), values["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_fake_quant: double backward is not supported"):
        first.sum().backward()
