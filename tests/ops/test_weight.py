"""The weight of a layer, scaled by a factor for each output channel and fake-quantized in one op."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.ops.layer import WeightGrid, quant_weight
from tests.cases import assert_same, floats, leaf, scales, zero_points
from tests.ops.test_layer import SHAPES, Shape, shapes

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Rows below, at and above the elements of a vector and of a partial sum.
LENGTHS = {"one": (5, 1), "short": (5, 63), "chunk": (3, 64), "long": (2, 3000)}


def grid_of(shape: Shape, *, per_output: bool = True, learned: bool = True, zero_point: bool = False) -> WeightGrid:
    count = shape.channels if per_output else 1
    scale, z = scales(count), zero_points(count, low=-9, high=9) if zero_point else None
    tensors = (leaf(t) if learned and t is not None else t for t in (scale, z))
    return WeightGrid(*tensors, -100, 90, **(shape.per_output if per_output else {}), grad_factor=0.3)


def tensors_of(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight and its factors, of both signs."""
    signs = torch.where(torch.arange(shape.channels) % 2 == 0, 9, -9)
    return floats(dtype, 3)(*shape.weight), (scales(shape.channels, 5) * signs).to(dtype)


def run(shape: Shape, weight: Tensor, grid: WeightGrid, factor: Tensor | None) -> Tensor:
    return quant_weight(weight, grid, factor, shape.geometry.transposed, shape.geometry.groups)


def composition(shape: Shape, weight: Tensor, grid: WeightGrid, factor: Tensor | None) -> Tensor:
    product = weight if factor is None else shape.scaled(weight, factor)
    how = {"axis": grid.axis, "group": grid.group, "grad_factor": grid.grad_factor}
    return ops.fake_quant(product, grid.scale, grid.zero_point, grid.qmin, grid.qmax, **how)


def assert_gradients(shape: Shape, weight: Tensor, grid: WeightGrid, factor: Tensor | None, grad: Tensor) -> None:
    """The weight's bit for bit; sums within the rounding of their terms, which float64 shows."""
    inputs = [leaf(weight)] + ([] if factor is None else [leaf(factor)])
    learned = [t for t in (grid.scale, grid.zero_point) if t is not None and t.requires_grad]
    found = torch.autograd.grad(run(shape, inputs[0], grid, *inputs[1:] or [None]), inputs + learned, grad)
    wanted = torch.autograd.grad(composition(shape, inputs[0], grid, *inputs[1:] or [None]), inputs + learned, grad)
    assert_same(found[0], wanted[0])
    assert found[0].stride() == weight.stride()
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_factor", [True, False], ids=["factor", "plain"])
@shapes
def test_values_are_those_of_the_composition(shape: Shape, with_factor: bool, dtype: torch.dtype) -> None:
    weight, factor = tensors_of(shape, dtype)
    for per_output in (True, False):
        for zero_point in (True, False):
            grid = grid_of(shape, per_output=per_output, zero_point=zero_point)
            given = factor if with_factor else None
            assert_same(run(shape, weight, grid, given), composition(shape, weight, grid, given))


@pytest.mark.parametrize("with_factor", [True, False], ids=["factor", "plain"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "fixed"])
@shapes
def test_gradients(shape: Shape, learned: bool, with_factor: bool) -> None:
    weight, factor = tensors_of(shape)
    for per_output in (True, False):
        grid = grid_of(shape, per_output=per_output, learned=learned)
        grad = floats(torch.float32, 7)(*shape.weight) * 0.125
        assert_gradients(shape, weight, grid, factor if with_factor else None, grad)


@pytest.mark.parametrize("size", LENGTHS.values(), ids=LENGTHS)
def test_rows_of_any_length(size: tuple[int, int]) -> None:
    shape = Shape((1, size[1]), size)
    weight, factor = tensors_of(shape)
    assert_same(run(shape, weight, grid_of(shape), factor), composition(shape, weight, grid_of(shape), factor))
    assert_gradients(shape, weight, grid_of(shape), factor, floats(torch.float32, 7)(*size))


@pytest.mark.parametrize("of_grad", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("of_weight", FORMATS.values(), ids=FORMATS)
def test_memory_formats(of_weight: torch.memory_format, of_grad: torch.memory_format) -> None:
    """Results are in the weight's format, for an incoming gradient in any."""
    shape = SHAPES["conv2d"]
    weight, factor = tensors_of(shape)
    weight = weight.contiguous(memory_format=of_weight)
    grad = floats(torch.float32, 7)(*shape.weight).contiguous(memory_format=of_grad)
    y = run(shape, weight, grid_of(shape), factor)
    assert y.stride() == weight.stride()
    assert_same(y, composition(shape, weight, grid_of(shape), factor))
    assert_gradients(shape, weight, grid_of(shape), factor, grad)
    assert_gradients(shape, weight, grid_of(shape), factor, grad.flip(0)[:, :, ::2].repeat_interleave(2, 2)[:, :, :3])


def test_the_sums_are_those_of_float64() -> None:
    """Over a row of 40,000 elements, within a few roundings of the sum of magnitudes over 16 of them."""
    shape = Shape((1, 40000), (3, 40000))
    weight, factor = tensors_of(shape)
    grid, grad = grid_of(shape), floats(torch.float32, 7)(*shape.weight)
    inputs = [leaf(weight), leaf(factor)]
    _, of_factor, of_scale = torch.autograd.grad(run(shape, inputs[0], grid, inputs[1]), [*inputs, grid.scale], grad)
    product = weight * factor[:, None]
    quotient = product / grid.scale.detach()[:, None]
    code = quotient.round().clamp(grid.qmin, grid.qmax)
    inside = quotient.round() == code
    terms = {"factor": grad * inside * weight, "scale": grad * torch.where(inside, code - quotient, code)}
    for found, name, times in ((of_factor, "factor", 1.0), (of_scale, "scale", grid.grad_factor)):
        exact = times * terms[name].double().sum(1)
        bound = 20 * 2.0**-24 * terms[name].double().abs().sum(1)
        assert ((found.double() - exact).abs() <= bound).all(), name


def test_the_number_of_threads_changes_no_bit() -> None:
    shape = Shape((1, 700), (300, 700))
    weight, factor = tensors_of(shape)
    grad, threads = floats(torch.float32, 7)(*shape.weight), torch.get_num_threads()
    results = []
    for count in (1, 4):
        torch.set_num_threads(count)
        grid = replace(grid_of(shape), axis=None, scale=leaf(scales(1)))
        inputs = [leaf(weight), leaf(factor)]
        y = run(shape, inputs[0], grid, inputs[1])
        results.append([y, *torch.autograd.grad(y, [*inputs, grid.scale], grad)])
    torch.set_num_threads(threads)
    for one, four in zip(*results, strict=True):
        assert_same(one, four)


def test_values_that_are_not_finite() -> None:
    shape = Shape((1, 70), (3, 70))
    weight, factor = tensors_of(shape)
    weight[0, 0], weight[1, 1], weight[2, 69] = torch.nan, torch.inf, -torch.inf
    assert_same(run(shape, weight, grid_of(shape), factor), composition(shape, weight, grid_of(shape), factor))
    grid = grid_of(shape)
    found = torch.autograd.grad(run(shape, leaf(weight), grid, factor), [grid.scale], torch.ones_like(weight))
    assert found[0].isnan().tolist() == [True, False, False]


def test_double_backward_with_fixed_scales() -> None:
    shape = Shape((1, 6), (3, 6))
    weight, factor = leaf(torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)), leaf(torch.ones(3).double())
    grid = WeightGrid(torch.full((3,), 0.01, dtype=torch.float64), None, -50, 50, axis=0)
    y = run(shape, weight, grid, factor)
    first = torch.autograd.grad(y.square().sum(), [weight, factor], create_graph=True)
    product = weight * factor[:, None]
    inside = ((product / 0.01).round().abs() <= 50).detach()
    straight = torch.where(inside, product - product.detach() + y.detach(), y.detach())
    wanted = torch.autograd.grad(straight.square().sum(), [weight, factor], create_graph=True)
    second = [torch.autograd.grad(sum(g.sum() for g in gradients), [weight, factor]) for gradients in (first, wanted)]
    for found, want in zip(first + second[0], wanted + second[1], strict=True):
        torch.testing.assert_close(found, want)


def test_double_backward_with_learned_scales_is_a_sentence() -> None:
    shape = Shape((1, 6), (3, 6))
    weight, factor = (leaf(t) for t in tensors_of(shape))
    grid = grid_of(shape)
    y = run(shape, weight, grid, factor)
    first, _ = torch.autograd.grad(y.square().sum(), [weight, grid.scale], create_graph=True)
    with pytest.raises(NotImplementedError, match="quant_weight: double backward through a scale"):
        torch.autograd.grad(first.sum(), [weight])


def test_compiled() -> None:
    shape = SHAPES["conv2d"]
    weight, factor = tensors_of(shape)

    def gradients(call) -> list[Tensor]:
        grid, inputs = grid_of(shape), [leaf(weight), leaf(factor)]
        y = call(inputs[0], grid, inputs[1])
        return [y, *torch.autograd.grad(y.square().sum(), [*inputs, grid.scale])]

    compiled = torch.compile(lambda w, g, f: run(shape, w, g, f), fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(lambda w, g, f: run(shape, w, g, f)), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"factor": torch.ones(7)},
            "quant_weight: factor must have one dimension with 1 element per output channel, 8",
        ),
        ({"weight": torch.ones(8, 6, dtype=torch.int32)}, "quant_weight: weight must be"),
        ({"weight": torch.ones(())}, "quant_weight: weight must have at least 1 dimensions"),
        ({"weight": torch.ones(8, 0)}, "quant_weight: weight must not be empty"),
        ({"groups": 3}, "quant_weight: groups must be at least 1 and divide weight.size"),
        ({"factor": torch.ones(8, device="meta")}, "quant_weight: factor must be on"),
    ],
)
def test_errors(change: dict, sentence: str) -> None:
    given = {"weight": torch.ones(8, 6), "grid": WeightGrid(torch.tensor(0.1), None, -8, 7), "factor": torch.ones(8)}
    with pytest.raises((TypeError, ValueError), match=sentence):
        quant_weight(**{**given, **change})
