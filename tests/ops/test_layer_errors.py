"""What quant_layer says to arguments that do not fit: the op, the argument, the rule, the value and the remedy."""

import re

import pytest
import torch
from torch import Tensor

from qtoolkit._native import library
from qtoolkit.ops.layer import Codes, Geometry, WeightGrid
from tests.ops.fields import Fields, in_one_list
from tests.ops.test_layer import SHAPES, Shape, conv, given, transposed

QUANT_LAYER, BACKWARD = Fields(library.quant_layer.default), Fields(library.quant_layer_backward.default)


def named(shape: Shape, **grid) -> dict:
    g = given(shape, factor=False, **grid)
    of_weight = {"weight": g.weight, "factor": g.factor, **vars(g.grid), "updated": None}
    of_weight |= {**vars(g.geometry), "integer": False}
    of_input = {f"x_{name}": value for name, value in vars(g.codes).items() if name != "codes"}
    rest = {"dtype": None, "memory_format": None, "raw": None, "raw_scale": None, "raw_factor": 1.0}
    call = {"x": g.x, "bias": g.bias, "codes": g.codes.codes, **of_input, **of_weight, **rest}
    return {name: t.detach() if isinstance(t, Tensor) else t for name, t in call.items()}


def backward_of(call: dict, grad: Tensor) -> dict:
    more = {"grad": grad, "size": list(call["x"].shape), "x_dtype": torch.float32, "wanted": [True] * 7}
    return {name: (call | more)[name] for name in BACKWARD.names}


CONV, DEEP = SHAPES["conv2d"], SHAPES["transposed2d_groups"]
CASES = {
    "x_dtype": (CONV, {"x": torch.ones(2, 6, 9, 8).int()}, TypeError, "x must be float32, float64, bfloat16 or"),
    "weight_dtype": (CONV, {"weight": torch.ones(8, 6, 3, 3).int()}, TypeError, "weight must be float32, float64"),
    "dtype": (CONV, {"dtype": torch.int32}, TypeError, "dtype must be float32, float64, bfloat16 or float16"),
    "codes_dtype": (
        CONV,
        {"codes": torch.ones(2, 6, 9, 8).int()},
        TypeError,
        "codes must be int8 or uint8, got Int; pass the result of quantize()",
    ),
    "codes_shape": (
        CONV,
        {"codes": torch.ones(2, 6, 9, 9).char()},
        ValueError,
        "codes must have the shape of x, [2, 6, 9, 8], or one dimension with two elements per byte, or half the "
        "channels of an image, got shape [2, 6, 9, 9].",
    ),
    "packed_by_channels_dtype": (
        CONV,
        {"codes": torch.ones(2, 3, 9, 8).char()},
        TypeError,
        "codes must be uint8, got Char; pass the result",
    ),
    "packed_by_channels_range": (
        CONV,
        {"codes": torch.ones(2, 3, 9, 8).byte()},
        ValueError,
        "x_qmin and x_qmax must lie in [-8, 7] or in [0, 15] for packed codes, got [-128, 127]; pass codes of the shape",
    ),
    "packed_by_channels_shape": (
        CONV,
        {"codes": torch.ones(2, 3, 9, 9).byte()},
        ValueError,
        "codes must have the shape of x, [2, 6, 9, 8], or one dimension with two elements per byte, or half the channels",
    ),
    "packed_dtype": (
        CONV,
        {"codes": torch.ones(432).char()},
        TypeError,
        "codes must be uint8, got Char; pass the result",
    ),
    "packed_length": (
        CONV,
        {"codes": torch.ones(431).byte()},
        ValueError,
        "codes must have one byte per two elements, 432 for size [2, 6, 9, 8], got shape [431]",
    ),
    "packed_range": (
        CONV,
        {"codes": torch.ones(432).byte()},
        ValueError,
        "x_qmin and x_qmax must lie in [-8, 7] or in [0, 15] for packed codes, got [-128, 127]; pass codes of the shape",
    ),
    "x_range": (
        CONV,
        {"x_qmin": 6, "x_qmax": 5},
        ValueError,
        "x_qmin must be smaller than x_qmax, got x_qmin=6 and x_qmax=5.",
    ),
    "x_range_of_int8": (
        CONV,
        {"x_qmin": 0, "x_qmax": 255},
        ValueError,
        "x_qmin and x_qmax must lie in [-128, 127], the range of Char, got [0, 255]; pass codes of the other dtype",
    ),
    "x_scale": (
        CONV,
        {"x_scale": torch.ones(6)},
        ValueError,
        "x_scale must have 1 element, since the input has one scale",
    ),
    "x_zero_point": (CONV, {"x_zero_point": torch.ones(1).int()}, TypeError, "x_zero_point must be float32, float64"),
    "weight_dims": (
        CONV,
        {"weight": torch.ones(8, 6)},
        ValueError,
        "weight must have 3 to 5 dimensions for a convolution, got shape [8, 6]; pass an empty stride for a linear layer.",
    ),
    "x_dims": (
        CONV,
        {"x": torch.ones(6, 9, 8), "codes": torch.ones(6, 9, 8).char()},
        ValueError,
        "x must have the 4 dimensions of weight, (N, C, ...), got shape [6, 9, 8]; add a batch dimension to a single",
    ),
    "x_channels": (
        CONV,
        {"groups": 2},
        ValueError,
        "x must have 12 channels (groups * weight.size(1)), got shape [2, 6",
    ),
    "x_channels_transposed": (
        DEEP,
        {"weight": torch.ones(8, 4, 4, 4)},
        ValueError,
        "x must have 8 channels (weight.size(0)), got shape [2, 6, 5, 4].",
    ),
    "stride_length": (
        CONV,
        {"stride": [1], "padding": [0], "dilation": [1], "output_padding": [0]},
        ValueError,
        "stride must have 2 integers of at least 1 and at most 2147483647, one for each spatial dimension of weight, got [1]",
    ),
    "geometry": (
        CONV,
        {"stride": [1]},
        ValueError,
        "geometry must have groups, transposed (0 or 1), and then the strides, paddings, dilations and output paddings of all "
        "spatial dimensions, got [1, 0, 1, 1, 1, 1, 1, 0, 0].",
    ),
    "stride": (CONV, {"stride": [1, 0]}, ValueError, "stride must have 2 integers of at least 1"),
    "padding": (CONV, {"padding": [0, -1]}, ValueError, "padding must have 2 integers of at least 0"),
    "padding_int32": (CONV, {"padding": [0, 2**40]}, ValueError, "padding must have 2 integers of at least 0"),
    "dilation": (CONV, {"dilation": [0, 1]}, ValueError, "dilation must have 2 integers of at least 1"),
    "output_padding": (
        CONV,
        {"output_padding": [1, 0]},
        ValueError,
        "output_padding must be smaller than stride or dilation of a transposed convolution, and 0 for others, got "
        "output_padding=[1, 0], stride=[1, 1], dilation=[1, 1] and transposed=0.",
    ),
    "output_padding_transposed": (DEEP, {"output_padding": [2, 0]}, ValueError, "output_padding must be smaller than"),
    "groups": (CONV, {"groups": 3}, ValueError, "groups must be at least 1 and divide weight.size(0) = 8, got 3."),
    "groups_0": (CONV, {"groups": 0}, ValueError, "groups must be at least 1 and divide weight.size(0) = 8, got 0."),
    "output_length": (
        CONV,
        {"dilation": [9, 1]},
        ValueError,
        "the output must not be empty, got length -7 in spatial dimension 0 for an input of shape [2, 6, 9, 8]",
    ),
    "empty_image": (
        CONV,
        {"x": torch.ones(2, 6, 0, 8), "codes": torch.ones(2, 6, 0, 8).char()},
        ValueError,
        "x must not be empty in its spatial dimensions, got shape [2, 6, 0, 8].",
    ),
    "empty_weight": (
        CONV,
        {"weight": torch.ones(0, 6, 3, 3)},
        ValueError,
        "weight must not be empty, got shape [0, 6, 3",
    ),
    "factor": (
        CONV,
        {"factor": torch.ones(6)},
        ValueError,
        "factor must have one dimension with 1 element per output channel, 8, got shape [6].",
    ),
    "bias": (
        DEEP,
        {"bias": torch.ones(4)},
        ValueError,
        "bias must have one dimension with 1 element per output channel, 8",
    ),
    "bias_dtype": (CONV, {"bias": torch.ones(8).int()}, TypeError, "bias must be float32, float64"),
    "qmin": (CONV, {"qmin": 9, "qmax": 7}, ValueError, "qmin must be smaller than qmax, got qmin=9 and qmax=7."),
    "scale": (CONV, {"scale": torch.ones(5)}, ValueError, "scale must have 1 or 8 elements (weight.size(0)), got 5"),
    "axis": (CONV, {"axis": 4}, ValueError, "axis must lie in [-4, 3] for an input of 4 dimensions, got 4."),
    "group": (DEEP, {"group": 4}, ValueError, "group must divide weight.size(0) = 6, got 4."),
    "block_size": (
        CONV,
        {"axis": 1, "block_size": 4},
        ValueError,
        "block_size must divide weight.size(1) = 6, got 4; pad",
    ),
    "linear_x": (
        SHAPES["linear2d"],
        {"weight": torch.ones(7, 13)},
        ValueError,
        "x must have weight.size(1) = 13 features",
    ),
    "linear_weight": (
        CONV,
        {"stride": [], "padding": [], "dilation": [], "output_padding": []},
        ValueError,
        "weight must have 2 dimensions, (out, in), for a linear layer, got shape [8, 6, 3, 3]; pass the stride of a conv",
    ),
    "linear_geometry": (
        SHAPES["linear2d"],
        {"groups": 2},
        ValueError,
        "stride must not be empty for a convolution, got padding=[], dilation=[], output_padding=[], transposed=0 and "
        "groups=2; pass none of them for a linear layer.",
    ),
    "vector": (
        SHAPES["linear2d"],
        {"x": torch.ones(12), "codes": torch.ones(6).byte(), "x_qmin": -8, "x_qmax": 7},
        ValueError,
        "x must have at least 2 dimensions, (..., features), got 1; add a batch dimension: x.unsqueeze(0).",
    ),
    "memory_format": (
        SHAPES["linear3d"],
        {"memory_format": torch.channels_last},
        ValueError,
        "memory_format must be None, torch.contiguous_format or, for a 2-d convolution, torch.channels_last, got "
        "ChannelsLast and stride=[].",
    ),
    "memory_format_unknown": (
        CONV,
        {"memory_format": torch.preserve_format},
        ValueError,
        "memory_format must be None, torch.contiguous_format or, for a 2-d convolution, torch.channels_last, got Preserve",
    ),
    "integer_zero_point": (
        CONV,
        {"zero_point": torch.ones(8), "integer": True},
        ValueError,
        "zero_point must be None with integer=True, since the int8 kernels need a symmetric weight; pass integer=False.",
    ),
    "integer_range": (
        CONV,
        {"qmin": 0, "qmax": 255, "integer": True},
        ValueError,
        "qmin and qmax must lie in [-128, 127] with integer=True, got [0, 255]; pass integer=False.",
    ),
    "integer_axis": (
        CONV,
        {"axis": 1, "scale": torch.ones(6), "integer": True},
        ValueError,
        "scale must have 1 element or 1 per output channel, and no blocks, with integer=True, got shape [6] with axis=1, "
        "group=1 and block_size=0; pass integer=False.",
    ),
    "integer_blocks": (
        CONV,
        {"axis": 0, "block_size": 8, "scale": torch.ones(54), "integer": True},
        ValueError,
        "scale must have 1 element or 1 per output channel, and no blocks",
    ),
    "integer_group": (
        DEEP,
        {"group": 1, "scale": torch.ones(4), "integer": True},
        ValueError,
        "scale must have 1 element or 1 per output channel",
    ),
}


def test_lists_of_numbers_are_made_as_the_ops_read_them() -> None:
    """The sentences below name each field that is in a list."""
    geometry = Geometry((1, 2), (3, 4), (5, 6), (7, 8), True, 9)
    assert [*geometry.numbers] == in_one_list("geometry", vars(geometry))
    for axis in (None, 1):
        grid = WeightGrid(torch.ones(1), None, -3, 4, axis, 2, 8, 0.5)
        assert [*grid.numbers] == in_one_list("grid", vars(grid))
    assert Codes(torch.ones(1), torch.ones(1), None, -5, 6).range == (-5, 6)
    with pytest.raises(ValueError, match=r"^Geometry: stride, padding, .* spatial dimension, got \(1, 1\), \(0,\), "):
        _ = Geometry((1, 1), (0,), (1, 1), (0, 0)).numbers


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"x_range": [-128]}, "x_range must have x_qmin and x_qmax, got [-128]."),
        (
            {"grid": [-8, 7, 1]},
            "grid must have qmin, qmax, group, block_size and, if there is one, the axis, got [-8, 7, 1].",
        ),
        ({"geometry": [1, 2, 1, 0, 1, 0]}, "geometry must have groups, transposed (0 or 1), and then the strides, "),
    ],
)
def test_lists_of_other_lengths(wrong: dict, sentence: str) -> None:
    call = QUANT_LAYER.arguments(named(CONV))
    with pytest.raises(ValueError, match=f"^quant_layer: {re.escape(sentence)}"):
        library.quant_layer.default(**call | wrong)


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(name: str) -> None:
    """In forward, and where the argument is one of backward too, there."""
    shape, wrong, error, sentence = CASES[name]
    call = named(shape) | wrong
    with pytest.raises(error, match=rf"^quant_layer: {re.escape(sentence)}"):
        QUANT_LAYER(**call)
    if name not in ("x_dtype", "dtype", "bias", "bias_dtype", "memory_format", "memory_format_unknown"):
        with pytest.raises(error, match=rf"^quant_layer_backward: {re.escape(sentence)}"):
            BACKWARD(**backward_of(call, torch.ones(2, 8, 9, 8)))


@pytest.mark.parametrize(
    "name", ["codes", "x_scale", "x_zero_point", "weight", "factor", "scale", "zero_point", "bias"]
)
def test_tensors_of_other_devices(name: str) -> None:
    call = named(CONV, x_zero_point=1.0, zero_point=True) | {"factor": torch.ones(8)}
    call[name] = call[name].to("meta")
    with pytest.raises(
        ValueError, match=f"^quant_layer: {name} must be on the device of the input, cpu, got meta; move"
    ):
        QUANT_LAYER(**call)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        (
            {"grad": torch.ones(2, 8, 9, 7)},
            ValueError,
            "grad must have the shape of the output, [2, 8, 9, 8], got [2, 8",
        ),
        ({"grad": torch.ones(2, 8, 9, 8).int()}, TypeError, "grad must be float32, float64, bfloat16 or float16"),
        ({"x_dtype": torch.int8}, TypeError, "dtype must be float32, float64, bfloat16 or float16"),
        ({"size": [2, 6, 8, 9]}, ValueError, "codes must have the shape of x, [2, 6, 8, 9]"),
        ({"size": []}, ValueError, "codes must have the shape of x, []"),
    ],
)
def test_backward(wrong: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=rf"^quant_layer_backward: {re.escape(sentence)}"):
        BACKWARD(**backward_of(named(CONV), torch.ones(2, 8, 9, 8)) | wrong)


def test_shapes_are_checked_without_data() -> None:
    call = named(conv((2, 6, 9, 8), (8, 6, 3, 3)))
    call = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in call.items()}
    assert QUANT_LAYER(**call).shape == (2, 8, 7, 6)
    with pytest.raises(ValueError, match="^quant_layer: factor must have one dimension"):
        QUANT_LAYER(**call | {"factor": torch.ones(3, device="meta")})


def test_a_transposed_output_of_no_elements() -> None:
    call = named(transposed((1, 2, 1), (2, 2, 2), 1, 1))
    with pytest.raises(ValueError, match="^quant_layer: the output must not be empty, got length 0 in"):
        QUANT_LAYER(**call)
