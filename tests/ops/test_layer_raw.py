"""The gradient of the scale of a layer's input, from what the input was before it was quantized."""

import math

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit._native import library
from qtoolkit.ops.layer import Codes, RawInput, WeightGrid, quant_layer, quant_weight
from tests.cases import floats, leaf, scales
from tests.ops.test_layer import SHAPES, Shape, conv, layer_arguments
from tests.ops.test_layer import Given as Layer

FACTOR = 0.25
IMAGES = {
    "image": conv((2, 3, 12, 11), (8, 3, 3, 3), 1, 1),
    "strided": conv((2, 3, 15, 14), (8, 3, 7, 7), 2, 3),
    "one channel": conv((2, 1, 9, 8), (4, 1, 5, 5), 1, 2),
    "unequal": SHAPES["conv2d_unequal"],
    "groups": SHAPES["conv2d_dilation"],
    "1d": SHAPES["conv1d"],
    "3d": SHAPES["conv3d"],
    "transposed": SHAPES["transposed2d_groups"],
    "linear": SHAPES["linear3d"],
}
GRIDS = {"signed": (-128, 127, None), "unsigned": (0, 255, 90.0), "four bits": (-8, 7, None)}
shapes = pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)


class Quantized:
    """A layer whose input was quantized, with the part of its elements outside the range that a calibrated range leaves."""

    def __init__(
        self, shape: Shape, low: int = -128, high: int = 127, zero: float | None = None, sign: int = 1, **kinds
    ):
        self.raw = floats(kinds.get("dtype", torch.float32))(*shape.x)
        self.shape, self.low, self.high = shape, low, high
        self.zero = None if zero is None else torch.tensor(zero)
        self.scale = leaf(torch.tensor(sign * float(self.raw.abs().max()) / (0.4 * (high - low))))
        codes_of = {"scale": self.scale.detach().abs(), "zero_point": self.zero, "qmin": low, "qmax": high}
        self.x = ops.fake_quant(self.raw, *codes_of.values())
        dtype = torch.int8 if low < 0 else torch.uint8
        codes = ops.quantize(self.raw, *codes_of.values(), dtype=dtype)
        grid = WeightGrid(leaf(scales(shape.channels)), None, -127, 127, **shape.per_output)
        self.layer = Layer(
            self.x,
            Codes(codes, self.scale.detach().abs(), self.zero, low, high),
            leaf(floats(torch.float32, 3)(*shape.weight)),
            grid,
            shape.geometry,
        )

    def run(self, integer: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        g = self.layer
        raw = RawInput(self.raw, self.scale, FACTOR)
        return quant_layer(self.x, g.codes, g.weight, g.grid, g.geometry, integer=integer, dtype=dtype, raw=raw)

    def expected(self, grad: Tensor) -> tuple[float, float]:
        """The gradient in float64, by the formula of LSQ, and the sum of the magnitudes of its terms."""
        g, scale = self.layer, self.scale.detach().double()
        weight = quant_weight(g.weight.detach(), g.grid, None, g.geometry.transposed, g.geometry.groups)
        x = leaf(self.x.double())
        (dx,) = torch.autograd.grad(self.shape.compute(x, weight.double(), None), x, grad.double())
        steps = self.raw.double() / scale.abs()
        level = steps.round() + (0 if self.zero is None else self.zero.double())
        clipped = level.clamp(self.low, self.high) - (0 if self.zero is None else self.zero.double())
        terms = torch.where((level < self.low) | (level > self.high), clipped, clipped - steps) * scale.sign()
        return FACTOR * float((dx * terms).sum()), FACTOR * float((dx * terms).abs().sum())


@shapes
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_gradient_is_that_of_lsq(shape: Shape, integer: bool, grid: tuple, sign: int) -> None:
    given = Quantized(shape, *grid, sign=sign)
    y = given.run(integer)
    grad = floats(torch.float32, 9)(*y.shape)
    found, of_weight, of_scale = torch.autograd.grad(y, (given.scale, given.layer.weight, given.layer.grid.scale), grad)
    wanted, mass = given.expected(grad)
    assert mass > 0
    assert abs(float(found) - wanted) <= 2e-6 * mass
    g = given.layer
    plain = quant_layer(g.x, g.codes, g.weight, g.grid, g.geometry, integer=integer)
    others = torch.autograd.grad(plain, (g.weight, g.grid.scale), grad)
    assert torch.equal(of_weight, others[0])
    assert torch.equal(of_scale, others[1])
    assert torch.equal(y, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    given = Quantized(IMAGES["strided"], dtype=dtype)
    y = given.run()
    assert y.dtype == dtype
    grad = floats(dtype, 9)(*y.shape)
    (found,) = torch.autograd.grad(y, given.scale, grad)
    wanted, mass = given.expected(grad)
    assert found.dtype == torch.float32
    assert abs(float(found) - wanted) <= max(torch.finfo(dtype).eps, 1e-6) * mass


def test_in_channels_last() -> None:
    given = Quantized(IMAGES["strided"])
    y = given.run(integer=True)
    grad = floats(torch.float32, 9)(*y.shape)
    (rows,) = torch.autograd.grad(y, given.scale, grad)
    given.raw = given.raw.contiguous(memory_format=torch.channels_last)
    (last,) = torch.autograd.grad(
        given.run(integer=True), given.scale, grad.contiguous(memory_format=torch.channels_last)
    )
    assert torch.equal(rows, last)


def test_the_input_gets_no_gradient_and_other_uses_of_it_add_theirs() -> None:
    given = Quantized(IMAGES["image"])
    given.x = ops.fake_quant(given.raw, given.scale, grad_factor=FACTOR)
    y = given.run()
    assert not any(each is not None and "FakeQuant" in each[0].name() for each in y.grad_fn.next_functions if each[0])
    grads = floats(torch.float32, 9)(*y.shape), floats(torch.float32, 10)(*given.x.shape)
    (both,) = torch.autograd.grad((given.run(), given.x), given.scale, grads, retain_graph=True)
    (of_layer,) = torch.autograd.grad(given.run(), given.scale, grads[0])
    (of_other,) = torch.autograd.grad(given.x, given.scale, grads[1])
    torch.testing.assert_close(both, of_layer + of_other)


def test_nan_in_the_image_reaches_the_gradient() -> None:
    given = Quantized(IMAGES["image"])
    given.raw[0, 0, 3, 3] = math.nan
    (found,) = torch.autograd.grad(given.run().sum(), given.scale)
    assert found.isnan()


def test_an_empty_batch_has_a_gradient_of_zero() -> None:
    given = Quantized(IMAGES["image"])
    given.raw, given.x = given.raw[:0], given.x[:0]
    c = given.layer.codes
    given.layer.codes = Codes(c.codes[:0], c.scale, c.zero_point, c.qmin, c.qmax)
    (found,) = torch.autograd.grad(given.run().sum(), given.scale)
    assert float(found) == 0


def call(given: Quantized, **changed) -> dict:
    names = [a.name for a in library.quant_layer.default._schema.arguments]
    values = (given.x, None, *layer_arguments(given.layer, False), None, None, given.raw, given.scale.detach(), FACTOR)
    call = dict(zip(names, values, strict=True))
    return {n: t.detach() if isinstance(t, Tensor) and not t.is_leaf else t for n, t in (call | changed).items()}


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        (
            {"raw_scale": None},
            ValueError,
            "raw and raw_scale must be given together, got raw alone; pass both, or neither",
        ),
        ({"raw": None}, ValueError, "raw and raw_scale must be given together, got raw_scale alone"),
        ({"raw": torch.ones(2, 3)}, ValueError, r"raw must have the shape of x, \[2, 3, 12, 11\], got \[2, 3\]"),
        ({"raw": torch.ones(2, 3, 12, 11).int()}, TypeError, "raw must be float32, float64, bfloat16 or float16, got"),
        (
            {"raw_scale": torch.ones(2)},
            ValueError,
            "raw_scale must have 1 element, since the input has one scale, got 2",
        ),
        ({"raw": torch.ones(2, 3, 12, 11, device="meta")}, ValueError, "raw must be on the device of"),
    ],
)
def test_errors_name_the_argument(changed: dict, error: type, sentence: str) -> None:
    with pytest.raises(error, match=f"^quant_layer: {sentence}"):
        library.quant_layer.default(**call(Quantized(IMAGES["image"]), **changed))


def test_a_raw_input_with_a_gradient_is_refused() -> None:
    given = Quantized(IMAGES["image"])
    with pytest.raises(NotImplementedError, match=r"^quant_layer: raw must not require grad, .*raw\.detach\(\)"):
        library.quant_layer.default(**call(given, raw=leaf(given.raw)))


@pytest.mark.parametrize("integer", [False, True])
def test_opcheck(integer: bool) -> None:
    given = Quantized(IMAGES["strided"])
    arguments = *layer_arguments(given.layer, integer), None, None, given.raw, given.scale, FACTOR
    torch.library.opcheck(library.quant_layer.default, (given.x, None, *arguments))
    grad = torch.ones_like(given.run().detach())
    rest = *layer_arguments(given.layer, integer), torch.float32, [False] * 6 + [True], given.raw, given.scale, FACTOR
    detached = [t.detach() if isinstance(t, Tensor) else t for t in (grad, list(given.x.shape), *rest)]
    torch.library.opcheck(library.quant_layer_backward.default, detached)
