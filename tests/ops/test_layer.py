"""quant_layer: against fake_quant and torch's layers in float, and against sums of integers on codes."""

import dataclasses
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit._native import library
from qtoolkit.ops.layer import Codes, Geometry, WeightGrid, quant_layer, quant_weight
from tests.cases import FLOATS, assert_same, floats, leaf, name_of, scales, zero_points
from tests.sweep import slow_but

OPS = {
    False: {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d},
    True: {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d},
}

LINEAR = Geometry()


@dataclass(frozen=True)
class Shape:
    """The sizes of input and weight, and the geometry."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: Geometry = LINEAR

    @property
    def channels(self) -> int:
        return self.weight[1] * self.geometry.groups if self.geometry.transposed else self.weight[0]

    @property
    def per_output(self) -> dict:
        """The channels of a weight's scale."""
        g = self.geometry
        return {"axis": 1, "group": g.groups} if g.transposed else {"axis": 0}

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        g = self.geometry
        if not g.stride:
            return nn.functional.linear(x, weight, bias)
        op = OPS[g.transposed][len(g.stride)]
        if g.transposed:
            return op(x, weight, bias, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
        return op(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Each output channel of the weight times its factor."""
        g, ones = self.geometry, [1] * (weight.dim() - 2)
        if not g.transposed:
            return weight * factor.view(-1, 1, *ones)
        grouped = weight.view(g.groups, -1, *weight.shape[1:])
        return (grouped * factor.view(g.groups, 1, -1, *ones)).view_as(weight)

    def over_outputs(self, values: Tensor) -> Tensor:
        return values if not self.geometry.stride else values.view(-1, *[1] * (len(self.weight) - 2))


def conv(x: tuple, weight: tuple, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Shape:
    dims = len(weight) - 2
    return Shape(
        x, weight, Geometry((stride,) * dims, (padding,) * dims, (dilation,) * dims, (0,) * dims, groups=groups)
    )


def transposed(
    x: tuple, weight: tuple, stride: int = 2, padding: int = 1, extra: int = 0, groups: int = 1, dilation: int = 1
) -> Shape:
    dims = len(weight) - 2
    each = (stride,) * dims, (padding,) * dims, (dilation,) * dims, (extra,) * dims
    return Shape(x, weight, Geometry(*each, transposed=True, groups=groups))


SHAPES = {
    "conv1d": conv((2, 6, 11), (4, 3, 3), 2, 1, groups=2),
    "conv2d": conv((2, 6, 9, 8), (8, 6, 3, 3), 1, 1),
    "conv2d_pointwise": conv((2, 6, 5, 7), (8, 6, 1, 1)),
    "conv2d_depthwise": conv((2, 6, 9, 8), (6, 1, 3, 3), 1, 1, groups=6),
    "conv2d_depthwise_multiplied": conv((2, 3, 9, 8), (6, 1, 3, 3), 2, 1, groups=3),
    "conv3d_depthwise": conv((2, 3, 5, 6, 5), (3, 1, 3, 3, 3), 1, 1, groups=3),
    "conv2d_stride": conv((2, 6, 11, 10), (8, 6, 3, 3), 2),
    "conv2d_strided_pointwise": conv((2, 6, 10, 8), (8, 6, 1, 1), 2),
    "conv2d_dilation": conv((2, 6, 11, 10), (8, 3, 3, 3), 1, 2, 2, 2),
    "conv2d_unequal": Shape((2, 6, 11, 10), (8, 6, 3, 2), Geometry((2, 1), (0, 1), (1, 2), (0, 0))),
    "conv3d": conv((2, 4, 5, 6, 5), (6, 2, 3, 3, 3), 2, 1, groups=2),
    "transposed1d": transposed((2, 6, 7), (6, 4, 3)),
    "transposed2d": transposed((2, 6, 5, 4), (6, 4, 3, 3), extra=1),
    "transposed2d_pointwise": transposed((2, 6, 5, 4), (6, 4, 1, 1), padding=0, extra=1),
    "transposed2d_groups": transposed((2, 6, 5, 4), (6, 4, 4, 4), groups=2, dilation=2),
    "transposed3d": transposed((1, 4, 3, 4, 3), (4, 3, 3, 3, 3), groups=2),
    "linear2d": Shape((5, 12), (7, 12)),
    "linear3d": Shape((2, 5, 12), (7, 12)),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@dataclass
class Given:
    """Arguments of quant_layer."""

    x: Tensor
    codes: Codes
    weight: Tensor
    grid: WeightGrid
    geometry: Geometry
    bias: Tensor | None = None
    factor: Tensor | None = None
    updated: Tensor | None = None

    NAMES = ("x", "weight", "factor", "scale", "zero_point", "bias")  # with a gradient

    def tensors(self) -> dict[str, Tensor]:
        named = self.x, self.weight, self.factor, self.grid.scale, self.grid.zero_point, self.bias
        return {name: t for name, t in zip(self.NAMES, named, strict=True) if t is not None}

    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors().values() if t.requires_grad]

    def run(self, integer: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return quant_layer(
            self.x, self.codes, self.weight, self.grid, self.geometry, self.bias, self.factor, integer, dtype
        )

    def composition(self, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        g, dtype = self.grid, dtype or self.x.dtype
        weight = quant_weight(self.weight, g, self.factor, self.geometry.transposed, self.geometry.groups)
        bias, x = None if self.bias is None else self.bias.to(dtype), self.x.to(dtype)
        if shape is SHAPES["conv2d_strided_pointwise"] and memory_format_of(self) is torch.channels_last:
            x = x[..., :-1, :]  # no output reads this row, with which torch destroys the heap (docs/troubleshooting.md)
        return shape.compute(x, weight.to(dtype), bias)


def given(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    codes: tuple[int, int] = (-128, 127),
    x_zero_point: float | None = None,
    packed: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    qmin: int = -127,
    qmax: int = 127,
    per_output: bool = True,
    zero_point: bool = False,
    learned: bool = True,
    factor: bool = True,
    bias: bool = True,
) -> Given:
    x_scale, zero = torch.tensor(0.1), None if x_zero_point is None else torch.tensor(x_zero_point)
    values = floats(dtype)(*shape.x).contiguous(memory_format=memory_format)
    x = ops.fake_quant(values, x_scale, zero, *codes)
    if not packed:
        quantized = ops.quantize(x, x_scale, zero, *codes, dtype=torch.int8 if codes[0] < 0 else torch.uint8)
    elif memory_format is torch.channels_last:
        n, c, h, w = shape.x
        pairs = ops.quantize_int4(x.permute(0, 2, 3, 1), x_scale, zero, *codes).view(n, h, w, c // 2)
        quantized = pairs.permute(0, 3, 1, 2)
    else:
        quantized = ops.quantize_int4(x, x_scale, zero, *codes)
    count = shape.channels if per_output else 1
    scale, z = scales(count), zero_points(count, low=-9, high=9) if zero_point else None
    channels = shape.per_output if per_output else {}
    grid = WeightGrid(
        *(leaf(t) if learned and t is not None else t for t in (scale, z)), qmin, qmax, **channels, grad_factor=0.3
    )
    others = floats(torch.float32, 3)
    return Given(
        leaf(x),
        Codes(quantized, x_scale, zero, *codes),
        leaf(others(*shape.weight)),
        grid,
        shape.geometry,
        leaf(others(shape.channels)) if bias else None,
        leaf(scales(shape.channels, 5) * torch.where(torch.arange(shape.channels) % 2 == 0, 9, -9)) if factor else None,
    )


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y, inputs, floats(y.dtype, 7)(*y.shape) * 0.125))


def memory_format_of(g: Given) -> torch.memory_format:
    """channels_last where input or weight is; torch's own convolutions choose by their sizes too."""
    images = [t for t in (g.x, g.weight) if t.dim() == 4 and not t.is_contiguous()]
    return torch.channels_last if images else torch.contiguous_format


def assert_is_composition(g: Given, shape: Shape, dtype: torch.dtype | None = None) -> None:
    """Value and gradients, bit for bit."""
    y, wanted = g.run(dtype=dtype), g.composition(shape, dtype)
    assert_same(y, wanted)
    assert y.is_contiguous(memory_format=memory_format_of(g))
    for got, want in zip(gradients(y, g.leaves()), gradients(wanted, g.leaves()), strict=True):
        assert_same(got, want)


# ---- in float: the composition


@shapes
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("factor", [False, True], ids=["no_factor", "factor"])
def test_value_and_gradients_are_those_of_the_composition(shape: Shape, learned: bool, factor: bool) -> None:
    for bias in (False, True):
        assert_is_composition(given(shape, learned=learned, factor=factor, bias=bias), shape)
        assert_is_composition(given(shape, learned=learned, factor=factor, bias=bias, per_output=False), shape)
        assert_is_composition(given(shape, learned=learned, factor=factor, bias=bias, zero_point=True), shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", ["conv2d", "transposed2d_groups", "linear3d"])
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    """The weight stays in float32."""
    shape = SHAPES[name]
    assert_is_composition(given(shape, dtype=dtype), shape)
    half = given(shape, dtype=dtype)
    half.weight = leaf(half.weight.to(dtype))
    assert_is_composition(half, shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_weight_with_other_strides_along_one_element(dtype: torch.dtype) -> None:
    """Dense in channels_last, but not for those of torch's convolutions that compare strides."""
    shape = conv((1, 2, 5, 7), (1, 2, 1, 3))
    g = given(shape, dtype=dtype)
    plain = dataclasses.replace(g, weight=leaf(g.weight.detach().contiguous(memory_format=torch.channels_last)))
    g.weight = leaf(plain.weight.detach().as_strided(shape.weight, (1, 1, 1, 2)))
    found, wanted = (gradients(each.run(integer=True), each.leaves()) for each in (g, plain))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", ["conv2d", "conv2d_depthwise", "linear2d"])
def test_the_dtype_to_compute_in(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    for of_input in (torch.float32, torch.bfloat16):
        g = given(shape, dtype=of_input)
        assert g.run(dtype=dtype).dtype == dtype
        assert_is_composition(g, shape, dtype)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_depthwise", "conv2d_stride", "transposed2d"])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_channels_last(name: str, learned: bool) -> None:
    shape = SHAPES[name]
    g = given(shape, memory_format=torch.channels_last, learned=learned)
    assert g.codes.codes.is_contiguous(memory_format=torch.channels_last)
    assert_is_composition(g, shape)
    g.weight = leaf(g.weight.detach().contiguous(memory_format=torch.channels_last))
    assert_is_composition(g, shape)


@shapes
@pytest.mark.parametrize("codes", [(-8, 7), (0, 15), (-2, 1)])
def test_packed_codes(shape: Shape, codes: tuple[int, int]) -> None:
    zero_point = 3.0 if codes[0] == 0 else None
    assert_is_composition(given(shape, codes=codes, packed=True, x_zero_point=zero_point), shape)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dilation", "conv2d_strided_pointwise", "transposed2d_groups"])
@pytest.mark.parametrize("codes", [(-8, 7), (0, 15)])
@pytest.mark.parametrize("last_weight", [False, True])
def test_packed_codes_of_two_channels(name: str, codes: tuple[int, int], last_weight: bool) -> None:
    shape = SHAPES[name]
    zero_point = 3.0 if codes[0] == 0 else None
    g = given(shape, codes=codes, packed=True, x_zero_point=zero_point, memory_format=torch.channels_last)
    if last_weight:
        g.weight = leaf(g.weight.detach().contiguous(memory_format=torch.channels_last))
    assert g.codes.codes.numel() * 2 == g.x.numel()
    assert_is_composition(g, shape)
    bytes_each = dataclasses.replace(g, codes=given(shape, codes=codes, x_zero_point=zero_point).codes)
    assert_same(g.run(integer=True), bytes_each.run(integer=True))


@pytest.mark.parametrize(("codes", "zero_point"), [((0, 255), None), ((0, 255), 114.0), ((-128, 127), -17.0)])
@shapes
def test_codes_of_any_grid(shape: Shape, codes: tuple[int, int], zero_point: float | None) -> None:
    assert_is_composition(given(shape, codes=codes, x_zero_point=zero_point), shape)


def test_blocks_of_scales() -> None:
    shape = SHAPES["linear2d"]
    g = given(shape, factor=False)
    g.grid = WeightGrid(leaf(scales(7 * 3).view(7, 3)), None, -8, 7, axis=1, block_size=4)
    assert_is_composition(g, shape)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
def test_an_empty_batch(name: str, integer: bool) -> None:
    shape = SHAPES[name]
    shape = dataclasses.replace(shape, x=(0, *shape.x[1:]))
    g = given(shape)
    y, wanted = g.run(integer), g.composition(shape)
    assert_same(y, wanted)
    for got, want in zip(gradients(y, g.leaves()), gradients(wanted, g.leaves()), strict=True):
        assert got.shape == want.shape
        assert not got.any()


IMAGES = {
    "stem": conv((2, 3, 16, 15), (8, 3, 7, 7), 2, 3),
    "mobile": conv((2, 3, 17, 14), (8, 3, 3, 3), 2, 1),
    "patches": conv((2, 3, 17, 16), (8, 3, 4, 4), 4),
    "gaps": conv((2, 1, 14, 13), (4, 1, 2, 2), 3),
    "padded": conv((2, 4, 9, 8), (4, 4, 2, 3), 2, 4),
    "unequal": Shape((2, 3, 12, 11), (8, 3, 5, 2), Geometry((3, 1), (1, 0), (1, 1), (0, 0))),
}


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
def test_the_gradient_of_an_image_under_a_strided_convolution(shape: Shape, integer: bool) -> None:
    """As near to that of float64 as torch's; all others bit for bit."""
    g = given(shape)
    grad = floats(torch.float32, 7)(*g.run().shape) * 0.125
    found = torch.autograd.grad(g.run(integer), g.leaves(), grad)
    wanted = torch.autograd.grad(g.composition(shape), g.leaves(), grad)
    quantized = ops.quantize(
        shape.scaled(g.weight, g.factor).detach(), g.grid.scale, None, -127, 127, 0, dtype=torch.int8
    )
    weight = quantized.double() * g.grid.scale.detach().double().view(-1, 1, 1, 1)
    x = leaf(g.x.detach().double())
    (exact,) = torch.autograd.grad(shape.compute(x, weight, None), [x], grad.double())
    (magnitude,) = torch.autograd.grad(shape.compute(x, weight.abs(), None), [x], grad.double().abs())
    terms = weight[:, 0].numel()
    assert ((found[0].double() - exact).abs() <= terms * 2.0**-24 * magnitude).all()
    for got, want in zip(found[1:], wanted[1:], strict=True):
        if not integer:
            assert_same(got, want)


# ---- on integers


def exact(g: Given, shape: Shape) -> tuple[Tensor, Tensor]:
    """The sums of products of integers times their steps, plus the bias, and their magnitude: float64."""
    product = g.weight if g.factor is None else shape.scaled(g.weight, g.factor)
    grid, c = g.grid, g.codes
    weight = ops.quantize(product, grid.scale, None, grid.qmin, grid.qmax, grid.axis, grid.group, dtype=torch.int8)
    dtype = torch.int8 if c.qmin < 0 else torch.uint8
    codes = ops.quantize(g.x.detach(), c.scale, c.zero_point, c.qmin, c.qmax, dtype=dtype).double()
    sums = shape.compute(codes - (0 if c.zero_point is None else c.zero_point.double()), weight.double(), None)
    assert torch.equal(sums, sums.round())
    steps = (grid.scale.detach() * c.scale).expand(shape.channels).double()
    parts = [sums * shape.over_outputs(steps)]
    parts += [] if g.bias is None else [shape.over_outputs(g.bias.detach()).double().expand_as(sums)]
    return sum(parts), sum(part.abs() for part in parts)


def assert_is_exact(g: Given, shape: Shape) -> None:
    """Up to a rounding of the sum, of its product with the step, and of the sum with the bias."""
    y, (wanted, magnitude) = g.run(integer=True), exact(g, shape)
    assert y.dtype == g.x.dtype
    assert ((y.double() - wanted).abs() <= 3 * 2.0**-24 * magnitude).all()


GRIDS = [
    *(((-128, 127), None), ((-128, 127), -128.0), ((-128, 127), 17.0), ((-127, 127), None), ((-8, 7), None)),
    *(((0, 255), None), ((0, 255), 114.0), ((0, 255), 255.0), ((0, 127), None), ((0, 15), 8.0)),
]


@shapes
@pytest.mark.parametrize(("codes", "zero_point"), GRIDS)
def test_sums_are_those_of_integers(shape: Shape, codes: tuple[int, int], zero_point: float | None) -> None:
    for bias, per_output in ((True, True), (False, False)):
        g = given(shape, codes=codes, x_zero_point=zero_point, bias=bias, per_output=per_output)
        assert_is_exact(g, shape)
        if codes[1] - codes[0] < 16:
            packed = given(shape, codes=codes, x_zero_point=zero_point, bias=bias, per_output=per_output, packed=True)
            assert_same(packed.run(integer=True), g.run(integer=True))


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "transposed2d", "linear2d", "linear3d"])
def test_weights_of_any_memory_order(name: str) -> None:
    shape = SHAPES[name]
    g = given(shape)
    dense = g.weight.detach()
    for order in itertools.permutations(range(dense.dim())):
        back = sorted(range(dense.dim()), key=lambda d: order[d])
        g.weight = leaf(dense.permute(order).contiguous().permute(back))
        assert_is_exact(g, shape)


DECONVOLUTIONS = {
    "one_channel": transposed((2, 5, 6, 5), (5, 1, 9, 9), 2, 4, 1),
    "upsample": transposed((2, 5, 4, 4), (5, 6, 2, 2), 2, 0),
    "no_stride": transposed((2, 5, 6, 5), (5, 3, 3, 3), 1, 1),
    "unequal": Shape((2, 5, 6, 5), (5, 3, 5, 4), Geometry((3, 2), (2, 1), (1, 1), (2, 0), transposed=True)),
    "gaps": transposed((2, 5, 4, 4), (5, 3, 2, 2), 3, 0),
    "not_reached": transposed((2, 5, 4, 4), (5, 3, 2, 2), 2, 0, 1),  # by any input: the bias alone
    "far_padding": transposed((2, 5, 6, 6), (5, 3, 3, 3), 2, 2, 1),
}


@pytest.mark.parametrize("shape", DECONVOLUTIONS.values(), ids=DECONVOLUTIONS)
@pytest.mark.parametrize(("codes", "zero_point"), [((-128, 127), 17.0), ((0, 255), 255.0), ((0, 255), None)])
def test_sums_of_transposed_convolutions(shape: Shape, codes: tuple[int, int], zero_point: float | None) -> None:
    for bias, per_output in ((True, True), (False, False)):
        assert_is_exact(given(shape, codes=codes, x_zero_point=zero_point, bias=bias, per_output=per_output), shape)


@pytest.mark.skipif(not library.int8_is_exact(), reason="torch has no exact int8 kernels on this processor")
@pytest.mark.parametrize("name", [name for name in DECONVOLUTIONS if name != "not_reached"])
def test_transposed_convolutions_have_int8_kernels(name: str) -> None:
    g = given(DECONVOLUTIONS[name])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        g.run(integer=True)
    assert "onednn::qconv_pointwise" in {event.name for event in profile.events()}


@shapes
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_integers_and_floats_agree(shape: Shape, learned: bool) -> None:
    """The gradients are those of the composition, in another order of summation."""
    g = given(shape, x_zero_point=-3.0, learned=learned)
    y, wanted = g.run(integer=True), g.composition(shape)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))
    assert y.is_contiguous()
    for got, want in zip(gradients(y, g.leaves()), gradients(wanted, g.leaves()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert got.is_contiguous()


@pytest.mark.parametrize("name", ["conv2d", "transposed2d", "conv2d_depthwise"])
def test_integers_in_channels_last(name: str) -> None:
    shape = SHAPES[name]
    g = given(shape, memory_format=torch.channels_last)
    y = g.run(integer=True)
    assert_same(y, given(shape).run(integer=True))
    assert y.is_contiguous(memory_format=torch.channels_last)
    for got, want in zip(gradients(y, g.leaves()), gradients(g.composition(shape), g.leaves()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_integers_of_float64_are_multiplied_in_float64() -> None:
    shape = SHAPES["conv2d"]
    g = given(shape, dtype=torch.float64)
    g.grid = dataclasses.replace(g.grid, scale=g.grid.scale.detach().double())
    g.weight, g.bias = (leaf(t.double()) for t in (g.weight, g.bias))
    torch.testing.assert_close(g.run(integer=True), g.composition(shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_integers_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    shape = SHAPES["conv2d"]
    g = given(shape, dtype=dtype)
    wide = given(shape)
    wide.x, wide.codes = g.x.float(), g.codes
    assert_same(g.run(integer=True), wide.run(integer=True).to(dtype))
    assert_same(wide.run(integer=True, dtype=dtype), wide.run(integer=True).to(dtype))


WIDE = {  # sums beyond 2^24, in digits of 4, 2 and 1 bits; beyond 2^31
    "digits_of_4": (
        Shape((2, 5000), (3, 5000)),
        Shape((1, 5000, 1), (5000, 3, 1), transposed((), (1, 1, 1), 1, 0).geometry),
    ),
    "digits_of_2": (Shape((2, 30_000), (3, 30_000)),),
    "digits_of_1": (Shape((1, 60_000), (2, 60_000)),),
    "float64": (Shape((1, 140_000), (2, 140_000)),),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("int8", [False, True], ids=["in_float", "int8"])
def test_sums_of_any_size_are_exact(name: str, int8: bool) -> None:
    """An input and a weight of the largest codes; without int8 kernels the input's zero point is none of its codes."""
    for shape in WIDE[name]:
        for codes, zero_point in (((0, 255), 0.0), ((-128, 127), 127.0)):
            g = given(shape, codes=codes, x_zero_point=zero_point, bias=False, factor=False, per_output=False)
            end = 25.5 if codes[0] == 0 else -25.5
            g.x = leaf(torch.full_like(g.x, end))
            values = ops.quantize(g.x.detach(), g.codes.scale, g.codes.zero_point, *codes, dtype=g.codes.codes.dtype)
            g.codes = dataclasses.replace(g.codes, codes=values)
            g.weight = leaf(torch.full_like(g.weight, 100.0))
            assert_is_exact(g, shape)


EXACT_WITHOUT_VNNI = """
import torch
from qtoolkit._native import library
from tests.ops.test_layer import SHAPES, assert_is_exact, given
print(library.int8_is_exact())
for name in ("conv1d", "conv2d", "conv2d_depthwise", "conv3d", "linear3d"):
    for codes in ((-128, 127), (0, 255)):
        assert_is_exact(given(SHAPES[name], codes=codes, x_zero_point=5.0), SHAPES[name])
"""


@pytest.mark.slow
def test_processors_whose_products_saturate_do_not_pass_the_trial() -> None:
    """oneDNN then uses the instructions of AVX2, which add pairs of products in int16."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run(
        [sys.executable, "-c", EXACT_WITHOUT_VNNI],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["False"]


def test_a_code_of_zero_outside_the_codes() -> None:
    """The int8 kernels do not take it; the sums are in float64."""
    shape = SHAPES["linear2d"]
    g = given(shape)
    g.codes = dataclasses.replace(g.codes, zero_point=torch.tensor(-1e6))
    y = g.run(integer=True)
    codes = g.codes.codes.double() + 1e6
    weight = ops.quantize(shape.scaled(g.weight, g.factor), g.grid.scale, None, -127, 127, 0, dtype=torch.int8).double()
    wanted = (codes @ weight.t()) * (g.grid.scale * g.codes.scale).detach().double() + g.bias.detach()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-2)
    g.codes = dataclasses.replace(g.codes, zero_point=torch.tensor(float("nan")))
    assert g.run(integer=True).isnan().all()


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("of", ["x", "weight"])
def test_nan_has_no_code_and_still_reaches_the_output(of: str, integer: bool) -> None:
    g = given(SHAPES["conv2d"])
    values = getattr(g, of).detach().clone()
    values.view(-1)[0] = torch.nan
    setattr(g, of, leaf(values))
    codes = ops.quantize(g.x.detach(), g.codes.scale, g.codes.zero_point, -128, 127, dtype=torch.int8)
    g.codes = dataclasses.replace(g.codes, codes=codes)
    y = g.run(integer)
    assert y.isnan().any()
    affected = y if of == "x" else y[:, 0]
    assert not integer or affected.isnan().all()  # of integers every result, or those of the weight's output channel


def test_weights_and_scales_of_zero() -> None:
    shape = SHAPES["conv2d"]
    g = given(shape)
    g.weight = leaf(torch.zeros_like(g.weight))
    for integer in (False, True):
        y = g.run(integer)
        assert torch.equal(y, g.bias.detach().view(-1, 1, 1).expand_as(y))
        assert not gradients(y, [g.x])[0].any()
    g = given(shape, bias=False)
    g.grid = dataclasses.replace(g.grid, scale=leaf(torch.zeros_like(g.grid.scale)))
    assert_is_composition(g, shape)
    assert g.run(integer=True).abs().max() < 1e-30


# ---- what backward keeps, and computes


def kept_by(g: Given, integer: bool = False) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        g.run(integer)
    return kept


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "packed"])
@shapes
def test_backward_keeps_codes_and_parameters_alone(shape: Shape, packed: bool, integer: bool) -> None:
    g = given(shape, codes=(-8, 7), packed=packed)
    kept = kept_by(g, integer)
    owned = [g.codes.codes, g.weight, g.factor, g.grid.scale]
    memory = {t.untyped_storage().data_ptr() for t in owned}
    assert sum(t.nbytes for t in kept if t.untyped_storage().data_ptr() not in memory) == 4  # the scale of x
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in owned) + 4
    assert g.codes.codes.nbytes == -(-g.x.numel() // 2) if packed else g.x.numel()


def test_buffers_may_change_between_forward_and_backward() -> None:
    """An observer moves a scale that is not learned."""
    shape = SHAPES["conv2d"]
    g = given(shape, learned=False)
    wanted = gradients(g.run(), g.leaves())
    y = g.run()
    g.codes.scale.mul_(3)
    g.grid.scale.mul_(3)
    for got, want in zip(gradients(y, g.leaves()), wanted, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("name", ["conv2d", "transposed2d_groups", "linear3d"])
def test_only_the_gradients_that_are_wanted(name: str, integer: bool) -> None:
    """Each alone is what it is with the others."""
    shape = SHAPES[name]
    g = given(shape, zero_point=not integer)
    wanted = gradients(g.run(integer), g.leaves())
    for i, each in enumerate(g.leaves()):
        y = g.run(integer)
        assert_same(gradients(y, [each])[0], wanted[i])
    for frozen in g.tensors().values():
        frozen.requires_grad_(False)
    assert not g.run(integer).requires_grad
    for i, each in enumerate(g.tensors().values()):
        each.requires_grad_(True)
        assert_same(gradients(g.run(integer), [each])[0], wanted[i])
        each.requires_grad_(False)


def ops_of(y: Tensor, inputs: list[Tensor]) -> list[str]:
    grad = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(y, inputs, grad)
    return [event.name for event in profile.events()]


def test_a_frozen_layer_does_not_rebuild_its_input() -> None:
    g = given(SHAPES["conv2d"])
    assert "qtoolkit::dequantize" in ops_of(g.run(), g.leaves())
    assert "qtoolkit::dequantize" not in ops_of(g.run(), [g.x, g.bias])


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "packed"])
@pytest.mark.parametrize("integer", [False, True])
def test_backward_copies_nothing_in_channels_last(packed: bool, integer: bool) -> None:
    """Neither the input, nor the gradients of input and output."""
    shape = conv((2, 16, 40, 40), (16, 16, 3, 3), 1, 1)
    last = {"memory_format": torch.channels_last}
    g = given(shape, codes=(-8, 7), packed=packed, learned=False, factor=False, **last)
    g.weight = leaf(g.weight.detach().contiguous(**last))
    y = g.run(integer=integer)
    grad = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.autograd.grad(y, g.leaves(), grad)
    copies = [e.input_shapes for e in profile.events() if e.name in ("aten::copy_", "aten::clone")]
    assert not [shapes for shapes in copies if list(shape.x) in shapes]


def test_two_backwards_give_the_same_bits() -> None:
    g = given(SHAPES["conv2d"])
    for integer in (False, True):
        y = g.run(integer)
        grad = floats(torch.float32, 7)(*y.shape)
        first, second = (torch.autograd.grad(y, g.leaves(), grad, retain_graph=True) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)


# ---- other modes


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
def test_double_backward_says_what_to_do(integer: bool) -> None:
    g = given(SHAPES["conv2d"])
    dx = torch.autograd.grad(g.run(integer).square().sum(), g.x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r"^quant_layer: double backward is not supported; .*save='float'"):
        dx.sum().backward()


@pytest.mark.parametrize("name", ["codes.scale", "codes.zero_point"])
def test_the_grid_of_the_input_has_no_gradient(name: str) -> None:
    g = given(SHAPES["conv2d"], x_zero_point=3.0)
    field = name.split(".")[1]
    g.codes = dataclasses.replace(g.codes, **{field: leaf(getattr(g.codes, field))})
    with pytest.raises(NotImplementedError, match=rf"^quant_layer: x_{field} must not require grad, .*\.detach\(\)"):
        g.run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("name", ["conv2d", "linear3d"])
def test_autocast_does_not_choose_the_dtype(name: str, dtype: torch.dtype) -> None:
    g = given(SHAPES[name])
    for integer in (False, True):
        wanted = g.run(integer)
        with torch.autocast("cpu", dtype):
            y = g.run(integer)
            found = gradients(y, g.leaves())
        assert_same(y, wanted)
        for got, want in zip(found, gradients(wanted, g.leaves()), strict=True):
            assert_same(got, want)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "transposed2d_groups", "conv3d", "linear3d"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "packed"])
def test_opcheck(name: str, packed: bool, integer: bool) -> None:
    shape = SHAPES[name]
    for g in (
        given(shape, codes=(-8, 7), packed=packed),
        given(shape, codes=(-8, 7), packed=packed, learned=False, factor=False, bias=False, zero_point=not integer),
        dataclasses.replace(given(shape, codes=(-8, 7), packed=packed), updated=torch.tensor([1])),
    ):
        torch.library.opcheck(library.quant_layer.default, arguments(g, integer))


@pytest.mark.slow
def test_opcheck_in_channels_last() -> None:
    for integer in (False, True):
        g = given(SHAPES["conv2d"], memory_format=torch.channels_last)
        torch.library.opcheck(library.quant_layer.default, arguments(g, integer))


def layer_arguments(g: Given, integer: bool) -> tuple:
    c, w = g.codes, g.grid
    of_weight = (g.weight, g.factor, w.scale, w.zero_point, w.numbers, w.grad_factor, g.updated)
    return c.codes, c.scale, c.zero_point, c.range, *of_weight, g.geometry.numbers, integer


def arguments(g: Given, integer: bool) -> tuple:
    return g.x, g.bias, *layer_arguments(g, integer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d", "transposed2d_groups"])
@pytest.mark.parametrize("integer", [False, True])
def test_the_memory_format_of_an_output(name: str, integer: bool) -> None:
    """It moves elements alone; opcheck compares it with that of meta tensors."""
    g = given(SHAPES[name])
    outputs = {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        args = (*arguments(g, integer), None, memory_format)
        outputs[memory_format] = library.quant_layer.default(*args)
        assert outputs[memory_format].is_contiguous(memory_format=memory_format)
        torch.library.opcheck(library.quant_layer.default, args)
    assert torch.equal(*outputs.values())


@pytest.mark.parametrize(
    "wanted", [[True] * 7, [True, False, False, False, False, True, False], [False, True] * 3 + [False]]
)
@pytest.mark.parametrize("name", ["conv2d", "linear3d"])
def test_opcheck_of_backward(name: str, wanted: list[bool]) -> None:
    g = given(SHAPES[name])
    for integer in (False, True):
        grad = torch.ones_like(g.run().detach())
        for updated in (None, torch.tensor([0, 2])):
            of_layer = layer_arguments(dataclasses.replace(g, updated=updated), integer)
            args = (grad, list(g.x.shape), *of_layer, torch.float32, wanted)
            detached = [t.detach() if isinstance(t, Tensor) else t for t in args]
            torch.library.opcheck(library.quant_layer_backward.default, detached)


class Block(nn.Module):
    """Quantizes its input and runs a convolution and a linear layer, as QAT modules do."""

    def __init__(self, integer: bool, learned: bool = True) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8, 5)
        self.conv_scale = nn.Parameter(torch.full((8,), 0.01), requires_grad=learned)
        self.linear_scale = nn.Parameter(torch.tensor(0.01), requires_grad=learned)
        self.factor = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.register_buffer("scale", torch.tensor(0.05))
        self.integer = integer

    def quantized(self, x: Tensor) -> tuple[Tensor, Codes]:
        y = ops.fake_quant(x, self.scale)
        return y, Codes(ops.quantize(y, self.scale), self.scale.clone(), None, -128, 127)

    def forward(self, x: Tensor) -> Tensor:
        grid = WeightGrid(self.conv_scale, None, -127, 127, axis=0)
        geometry = Geometry((1, 1), (1, 1), (1, 1), (0, 0))
        y = quant_layer(*self.quantized(x), self.conv.weight, grid, geometry, self.conv.bias, self.factor, self.integer)
        y = torch.relu(y).mean((2, 3))
        grid = WeightGrid(self.linear_scale, None, -127, 127)
        return quant_layer(
            *self.quantized(y), self.linear.weight, grid, Geometry(), self.linear.bias, None, self.integer
        )


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("backend", slow_but(["eager", "aot_eager", "inductor"], "eager"))
def test_compile_without_graph_breaks_for_any_batch(backend: str, integer: bool) -> None:
    torch._dynamo.reset()
    block = Block(integer)
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for batch in (3, 5):
        x = floats(torch.float32, batch)(batch, 6, 9, 8) * 0.2
        inputs = [leaf(x), *block.parameters()]
        got, wanted = compiled(inputs[0]), block(inputs[0])
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        for g, w in zip(gradients(got, inputs), gradients(wanted, inputs), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))


def test_no_recompilation_between_steps() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    block = Block(integer=False)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for seed in range(3):
        compiled(floats(torch.float32, seed)(2, 6, 9, 8)).sum().backward()
        block.scale.mul_(1.1)
    assert counter.frame_count == 1


def test_export_keeps_the_op() -> None:
    block, x = Block(integer=False), floats(torch.float32)(2, 6, 9, 8)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: batch},))
    other = floats(torch.float32, 3)(5, 6, 9, 8)
    for exported in (program, program.run_decompositions()):
        assert str(exported.graph).count("qtoolkit.quant_layer.") == 2
        assert_same(exported.module()(other), block(other))


# ---- the gradients of some output channels


UPDATED = {
    "two": lambda channels: torch.tensor([0, channels - 1]),
    "none": lambda channels: torch.tensor([], dtype=torch.int64),
}


@shapes
@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
@pytest.mark.parametrize("updated", UPDATED.values(), ids=UPDATED)
def test_some_channels_have_the_gradients_of_all_and_others_zeros(shape: Shape, integer: bool, updated: Any) -> None:
    channels = updated(shape.channels)
    g = given(shape)
    of_all = gradients(g.run(integer), g.leaves())
    y = quant_layer(g.x, g.codes, g.weight, g.grid, g.geometry, g.bias, g.factor, integer, updated=channels)
    assert torch.equal(y, g.run(integer))
    weight = quant_weight(g.weight, g.grid, g.factor, g.geometry.transposed, g.geometry.groups, channels)
    of_weight = gradients(shape.compute(g.x, weight, g.bias), g.leaves())
    mask = torch.zeros(shape.channels).index_fill(0, channels, 1.0)
    of_channel = {"weight": shape.scaled(torch.ones(shape.weight), mask), "factor": mask, "scale": mask}
    for name, *found, whole in zip(g.tensors(), gradients(y, g.leaves()), of_weight, of_all, strict=True):
        wanted = (
            torch.where(of_channel.get(name, torch.ones(())).view_as(whole) > 0, whole, 0)
            if name in of_channel
            else whole
        )
        for each in found:
            # Sums of the same products in another order: their errors are relative to the largest values.
            torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(whole.abs().max())))


def test_a_double_backward_of_some_channels_is_zero_in_others() -> None:
    g = given(SHAPES["linear2d"], learned=False, factor=False, bias=False)
    weight = quant_weight(g.weight, g.grid, updated=torch.tensor([1]))
    (first,) = torch.autograd.grad(weight.square().sum(), g.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), g.weight)
    for each in (first, second):
        assert each.any(1).tolist() == [channel == 1 for channel in range(7)]


@pytest.mark.parametrize(
    ("updated", "words"),
    [
        (torch.tensor([0.0]), "updated must have dtype int64, got Float"),
        (torch.tensor([[0]]), "updated must have one dimension"),
        (torch.tensor([3, 7]), "updated must have indices of the 7 output channels, got 7"),
    ],
)
def test_other_indices_of_channels_are_refused(updated: Tensor, words: str) -> None:
    g = given(SHAPES["linear2d"])
    with pytest.raises((TypeError, ValueError), match=words):
        quant_layer(g.x, g.codes, g.weight, g.grid, g.geometry, updated=updated)
