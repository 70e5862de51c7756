"""PReLU with a quantizer behind it: values and gradients against the oracle, and against the two ops."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F

from qtoolkit import ops
from tests import reference
from tests.cases import FLOATS, LAYOUTS, RUNS, SPECIAL, assert_laid_out_as, assert_same, floats, leaf, name_of, scales
from tests.ops.test_gradients import assert_sum

native = torch.ops.qtoolkit
GRIDS = {  # zero point and codes
    "signed": (None, -100, 90),
    "unsigned": (None, 0, 200),
    "two_bits": (None, -2, 1),
    "affine": (torch.tensor([29.0]), 0, 255),
    "affine, not rounded": (torch.tensor(-7.4, dtype=torch.float64), -128, 127),
}


def slopes(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of both signs, with 0 and 1 among them if there are that many."""
    spread = torch.linspace(-0.6, 1.3, count)
    spread[count // 2 :][:1], spread[-1:] = 0.25 if count == 1 else 0.0, 0.25 if count == 1 else 1.0
    return spread.to(dtype)


def check(x: Tensor, weight: Tensor, scale: Tensor, grid: tuple) -> None:
    wanted = reference.Prelu(x, weight, scale, *grid)
    y = ops.prelu_fake_quant(x, weight, scale, *grid)
    assert_same(y, wanted.values())
    assert_laid_out_as(y, x)
    grad = floats(x.dtype, 7)(*x.shape)
    dx, dw, ds = native.prelu_fake_quant_backward(grad, x, weight, scale, *grid, 0.5)
    wanted.gradients(grad, 0.5)
    assert_same(dx, wanted.dx)
    assert_sum(dw, weight, wanted.dw, wanted.dw_mass, x)
    assert_sum(ds, scale, wanted.ds, wanted.ds_mass, x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype, grid: str) -> None:
    x = LAYOUTS[layout](floats(dtype))
    check(x, slopes(1), scales(1), GRIDS[grid])
    if x.dim() >= 2 and x.size(1) > 0:
        check(x, slopes(x.size(1), dtype), -scales(1)[0], GRIDS[grid])


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_around_chunks_blocks_and_rows(run: tuple[int, int, int]) -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = floats(torch.float32)(*run, 1).contiguous(memory_format=memory_format)
        check(x, slopes(x.size(1)), scales(1), GRIDS["signed"])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(2, 1)
    for weight in (torch.tensor([0.25]), torch.tensor([0.0]), torch.tensor([float("inf")]), slopes(x.size(1))):
        wanted = reference.Prelu(x, weight, torch.tensor(0.1))
        assert_same(ops.prelu_fake_quant(x, weight, torch.tensor(0.1)), wanted.values())


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=name_of)
@pytest.mark.parametrize("count", [1, 6])
def test_it_is_the_composition(dtype: torch.dtype, count: int) -> None:
    """Values and the gradient of x bit for bit; the sums up to the order of their terms."""
    x, grad = floats(dtype)(4, 6, 15, 17), floats(dtype, 7)(4, 6, 15, 17)
    given = [leaf(x), leaf(slopes(count, dtype)), leaf(torch.tensor(0.1, dtype=dtype))]
    ours = ops.prelu_fake_quant(*given, None, -100, 90, 0.3)
    theirs = ops.fake_quant(F.prelu(*given[:2]), given[2], None, -100, 90, grad_factor=0.3)
    assert_same(ours, theirs)
    found, wanted = (torch.autograd.grad(y, given, grad) for y in (ours, theirs))
    assert_same(found[0], wanted[0])
    for got, want in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12 if dtype == torch.float64 else 2e-4, atol=0)


def test_gradients_are_given_to_those_that_ask() -> None:
    x, w, s = floats(torch.float32)(2, 3, 5), slopes(3), scales(1)
    wanted = native.prelu_fake_quant_backward(torch.ones_like(x), x, w, s, None, -128, 127)
    for asks in range(1, 8):
        given = [leaf(t) if asks & 1 << i else t for i, t in enumerate((x, w, s))]
        ops.prelu_fake_quant(*given).sum().backward()
        for i, t in enumerate(given):
            assert (t.grad is not None) == bool(asks & 1 << i)
            assert t.grad is None or torch.equal(t.grad, wanted[i])
    assert not ops.prelu_fake_quant(x, w, s).requires_grad


def test_two_runs_with_any_number_of_threads() -> None:
    x, w = floats(torch.float32)(8, 7, 90, 91), slopes(7)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            found.append(native.prelu_fake_quant_backward(x * 2, x, w, scales(1), None, -100, 90))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_compiled_without_breaks_for_any_batch() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    w, s = leaf(slopes(3)), leaf(torch.tensor(0.1))
    compiled = torch.compile(lambda x: ops.prelu_fake_quant(x, w, s).sum(), fullgraph=True, backend=counter)
    for batch in (2, 5, 9):
        x = leaf(floats(torch.float32)(batch, 3, 4))
        found = torch.autograd.grad(compiled(x), (x, w, s))
        wanted = torch.autograd.grad(ops.prelu_fake_quant(x, w, s).sum(), (x, w, s))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert counter.frame_count <= 2


ERRORS = {
    "x is int": (
        TypeError,
        {"x": torch.ones(2, 3, dtype=torch.int)},
        "x must be float32, float64, bfloat16 or float16",
    ),
    "weight is int": (TypeError, {"weight": torch.ones(3, dtype=torch.int)}, "weight must be float32, float64"),
    "weight has two dimensions": (
        ValueError,
        {"weight": torch.ones(1, 3)},
        "weight must have one dimension, got shape",
    ),
    "weight of others": (ValueError, {"weight": torch.ones(2)}, "weight must have 1 or 3 elements"),
    "x without channels": (
        ValueError,
        {"x": torch.ones(3)},
        "x must have at least 2 dimensions, (batch, channels, ...)",
    ),
    "scales": (ValueError, {"scale": torch.ones(3)}, "scale must have 1 element, since the op has one grid"),
    "codes": (ValueError, {"qmin": 5, "qmax": 5}, "qmin must be smaller than qmax, got qmin=5 and qmax=5"),
    "zero points": (
        ValueError,
        {"zero_point": torch.ones(3)},
        "zero_point must have 1 element, since the op has one grid",
    ),
    "device": (ValueError, {"scale": torch.ones(1, device="meta")}, "scale must be on the device of the input, cpu"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    kind, wrong, sentence = ERRORS[case]
    given = {"x": torch.ones(2, 3), "weight": torch.ones(3), "scale": torch.ones(1), "zero_point": None}
    given |= {"qmin": -8, "qmax": 7} | wrong
    for op, more in ((ops.prelu_fake_quant, {}), (native.prelu_fake_quant_backward, {"grad": given["x"]})):
        with pytest.raises(kind) as error:
            op(**given, **more)
        assert sentence in str(error.value)


def test_the_gradient_has_the_shape_of_x() -> None:
    with pytest.raises(ValueError, match="^prelu_fake_quant_backward: grad must have the shape of x, "):
        native.prelu_fake_quant_backward(torch.ones(2, 2), torch.ones(2, 3), torch.ones(3), torch.ones(1), None, -8, 7)


def test_a_zero_point_has_no_gradient() -> None:
    with pytest.raises(
        NotImplementedError, match="^prelu_fake_quant: zero_point must not require grad, since the op has"
    ):
        ops.prelu_fake_quant(torch.ones(2, 3), torch.ones(3), scales(1), leaf(torch.zeros(1)))


def test_double_backward_is_an_error() -> None:
    x = leaf(torch.randn(2, 3))
    (dx,) = torch.autograd.grad(ops.prelu_fake_quant(x, slopes(3), scales(1)).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^prelu_fake_quant: double backward is not supported; compute the"):
        dx.sum().backward()
