"""Errors of the ops: the type, and a sentence that names the op, the argument, the rule and the value."""

import re

import pytest
import torch

from qtoolkit import ops
from tests.cases import bounds

native = torch.ops.qtoolkit
F32, F64, BF16, I32, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64


class Maker:
    """Tensors of ones on a device: m(4, 6) is a float32 one."""

    def __init__(self, device: str):
        self.device = device

    def __call__(self, *sizes: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.ones(sizes, dtype=dtype, device=self.device)


def learned(m: Maker, grad=(4, 6), scale=(1,), qmin=-8, qmax=7, axis=None, dtype=F32, grad_dtype=F32):
    return native.fake_quant_learned_backward(
        m(*grad, dtype=grad_dtype), m(4, 6, dtype=dtype), m(*scale), None, qmin, qmax, axis
    )


def observe(m: Maker, lo=(6,), hi=(6,), momentum=None, axis=1, group=1, dtype=F32, kept=(F32, F32)):
    ops.observe_minmax_(m(4, 6, dtype=dtype), m(*lo, dtype=kept[0]), m(*hi, dtype=kept[1]), momentum, axis, group)


# op, call, error, sentence
GRIDS = {
    "two_scales_per_tensor": (
        lambda m: (m(4, 6), m(2)),
        {},
        "scale must have 1 element if axis is None, got 2 .shape .2..; pass the channel axis",
    ),
    "scales_of_another_axis": (
        lambda m: (m(4, 6), m(4)),
        {"axis": 1},
        r"scale must have 1 or 6 elements \(x.size\(1\)\), got 4 \(shape \[4\]\)",
    ),
    "scales_negative_axis": (
        lambda m: (m(4, 6), m(4)),
        {"axis": -1},
        r"scale must have 1 or 6 elements \(x.size\(1\)\), got 4",
    ),
    "scales_of_a_group": (
        lambda m: (m(4, 6), m(6)),
        {"axis": 1, "group": 2},
        r"scale must have 1 or 12 elements \(group \* x.size\(1\)\), got 6",
    ),
    "no_scale": (lambda m: (m(4, 6), m(0)), {}, "scale must have 1 element if axis is None, got 0"),
    "zero_points_fewer": (
        lambda m: (m(4, 6), m(6), m(1)),
        {"axis": 1},
        "zero_point must have as many elements as scale, 6, got 1",
    ),
    "zero_points_more": (
        lambda m: (m(4, 6), m(1), m(6)),
        {"axis": 1},
        "zero_point must have as many elements as scale, 1, got 6",
    ),
    "zero_points_wrong": (
        lambda m: (m(4, 6), m(6), m(5)),
        {"axis": 1},
        r"zero_point must have 1 or 6 elements \(x.size\(1\)\), got 5",
    ),
    "axis_too_large": (
        lambda m: (m(4, 6), m(1)),
        {"axis": 2},
        r"axis must lie in \[-2, 1\] for an input of 2 dimensions, got 2",
    ),
    "axis_too_small": (
        lambda m: (m(4, 6), m(1)),
        {"axis": -3},
        r"axis must lie in \[-2, 1\] for an input of 2 dimensions, got -3",
    ),
    "axis_of_a_scalar": (lambda m: (m(), m(1)), {"axis": 0}, "axis must be None for an input of no dimensions, got 0"),
    "group_zero": (lambda m: (m(4, 6), m(1)), {"axis": 1, "group": 0}, "group must be at least 1, got 0"),
    "group_enormous": (
        lambda m: (m(0, 6), m(1)),
        {"axis": 1, "group": 2**62},
        "group must be at most 2147483647, got 4611686018427387904",
    ),
    "float8_scale": (
        lambda m: (m(4, 6), m(1, dtype=torch.float8_e5m2)),
        {},
        TypeError,
        "scale must be float32, float64, bfloat16 or float16, got Float8_e5m2",
    ),
    "group_without_axis": (lambda m: (m(4, 6), m(1)), {"group": 2}, "group=2 needs an axis, got axis=None"),
    "group_and_axis_0": (
        lambda m: (m(4, 6), m(1)),
        {"axis": 0, "group": 2},
        "group=2 divides dimension 0, so axis must be another dimension, got 0",
    ),
    "group_and_axis_-2": (
        lambda m: (m(4, 6), m(1)),
        {"axis": -2, "group": 2},
        "group=2 divides dimension 0, so axis must be another dimension, got 0",
    ),
    "group_not_dividing": (
        lambda m: (m(4, 6), m(1)),
        {"axis": 1, "group": 3},
        r"group must divide x.size\(0\) = 4, got 3",
    ),
    "block_size_negative": (
        lambda m: (m(4, 6), m(1)),
        {"axis": 1, "block_size": -1},
        "block_size must be at least 1, or 0 for no blocks, got -1",
    ),
    "block_size_without_axis": (
        lambda m: (m(4, 6), m(1)),
        {"block_size": 2},
        "block_size=2 needs an axis, got axis=None; pass the axis that blocks run along",
    ),
    "block_size_and_group": (
        lambda m: (m(4, 6), m(1)),
        {"axis": 1, "group": 2, "block_size": 2},
        "block_size=2 requires group=1, got group=2; pass only one of them",
    ),
    "block_size_not_dividing": (
        lambda m: (m(4, 6), m(1)),
        {"axis": -1, "block_size": 4},
        r"block_size must divide x.size\(1\) = 6, got 4; pad x with zeros or choose a divisor",
    ),
    "scales_of_blocks": (
        lambda m: (m(4, 6), m(6, 2)),
        {"axis": 1, "block_size": 3},
        r"scale must have 1 element or shape \[4, 2\] \(or as many elements in one dimension\): the shape of x, "
        r"with dimension 1 divided by block_size = 3; got shape \[6, 2\]",
    ),
    "scales_of_other_blocks": (
        lambda m: (m(4, 6), m(8), m(2, 4)),
        {"axis": 1, "block_size": 3},
        r"zero_point must have 1 element or shape \[4, 2\] .*; got shape \[2, 4\]",
    ),
    "integer_scale": (
        lambda m: (m(4, 6), m(1, dtype=I32)),
        {},
        TypeError,
        r"scale must be float32, float64, bfloat16 or float16, got Int; convert it with .float\(\)",
    ),
    "integer_zero_point": (
        lambda m: (m(4, 6), m(1), m(1, dtype=I64)),
        {},
        TypeError,
        "zero_point must be float32, float64, bfloat16 or float16, got Long",
    ),
}
QMIN = {
    "equal": ((5, 5), "qmin must be smaller than qmax, got qmin=5 and qmax=5"),
    "reversed": ((7, -8), "qmin must be smaller than qmax, got qmin=7 and qmax=-8"),
    "beyond_int32": ((0, 2**31), r"qmin and qmax must lie in the range of int32, got \[0, 2147483648\]"),
    "below_int32": ((-(2**31) - 1, 0), "qmin and qmax must lie in the range of int32"),
}
INPUT_DTYPES = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
X_RULE = r"must be float32, float64, bfloat16 or float16, got \w+; convert it with .float\(\)"


def grid_errors() -> list:
    """What is wrong with a grid is said by every op that takes one."""
    calls = {
        "fake_quant": ops.fake_quant,
        "quantize": ops.quantize,
        "dequantize": lambda x, *args, **kwargs: ops.dequantize(x.to(torch.int8), *args, **kwargs),
        "quantize_int4": ops.quantize_int4,
        "dequantize_int4": lambda x, *args, **kwargs: ops.dequantize_int4(
            x.new_empty((x.numel() + 1) // 2, dtype=torch.uint8), x.shape, *args, **kwargs
        ),
        "fake_quant_learned_backward": lambda x, s, z=None, **k: native.fake_quant_learned_backward(
            x, x, s, z, -8, 7, **k
        ),
    }
    found = []
    for op, call in calls.items():
        for name, (make, named, *error) in GRIDS.items():
            kind, sentence = (ValueError, *error) if len(error) == 1 else error
            run = lambda m, call=call, make=make, named=named: call(*make(m), **named)  # noqa: E731
            found.append(pytest.param(run, kind, f"{op}: {sentence}", id=f"{op}-{name}"))
    return found


def range_errors() -> list:
    calls = {
        "fake_quant": lambda m, *q: ops.fake_quant(m(4, 6), m(1), None, *q),
        "quantize": lambda m, *q: ops.quantize(m(4, 6), m(1), None, *q, dtype=torch.int32),
        "quantize_int4": lambda m, *q: ops.quantize_int4(m(4, 6), m(1), None, *q),
        "fake_quant_learned_backward": lambda m, *q: learned(m, qmin=q[0], qmax=q[1]),
    }
    return [
        pytest.param(lambda m, call=call, q=q: call(m, *q), ValueError, f"{op}: {sentence}", id=f"{op}-{name}")
        for op, call in calls.items()
        for name, (q, sentence) in QMIN.items()
    ]


def input_dtype_errors() -> list:
    calls = {
        "fake_quant: x": lambda m, d: ops.fake_quant(m(4, dtype=d), m(1)),
        "quantize: x": lambda m, d: ops.quantize(m(4, dtype=d), m(1)),
        "quantize_int4: x": lambda m, d: ops.quantize_int4(m(4, dtype=d), m(1)),
        "minmax: x": lambda m, d: ops.minmax(m(4, dtype=d)),
        "observe_minmax_: x": lambda m, d: observe(m, dtype=d),
        "fake_quant_learned_backward: x": lambda m, d: learned(m, dtype=d),
        "fake_quant_learned_backward: grad": lambda m, d: learned(m, grad_dtype=d),
        "fake_quant_backward: grad": lambda m, d: native.fake_quant_backward(
            m(4, dtype=d), m(1, dtype=torch.uint8), []
        ),
    }
    return [
        pytest.param(
            lambda m, call=call, d=d: call(m, d),
            TypeError,
            f"{op} {X_RULE}",
            id=f"{op.replace(': ', '-')}-{str(d)[6:]}",
        )
        for op, call in calls.items()
        for d in INPUT_DTYPES
    ]


def code_errors() -> list:
    ranges = {torch.int8: (-129, 127), torch.uint8: (-1, 255), torch.int16: (-5, 32768), torch.uint16: (0, 65536)}
    narrow = [
        pytest.param(
            lambda m, d=d, q=q: ops.quantize(m(4), m(1), None, *q, dtype=d),
            ValueError,
            re.escape(f"quantize: qmin and qmax must lie in the range of {name}, {list(bounds(d))}, got {list(q)}"),
            id=f"quantize-too_narrow-{str(d)[6:]}",
        )
        for (d, q), name in zip(ranges.items(), ("Char", "Byte", "Short", "UInt16"), strict=True)
    ]
    rule = "must be int8, uint8, int16, uint16 or int32, got "
    wrong = [
        pytest.param(
            lambda m, d=d: ops.quantize(m(4), m(1), dtype=d),
            TypeError,
            f"quantize: dtype {rule}",
            id=f"quantize-to-{str(d)[6:]}",
        )
        for d in (I64, torch.uint32, torch.bool, F32)
    ]
    wrong += [
        pytest.param(
            lambda m, d=d: ops.dequantize(m(4, dtype=d), m(1)),
            TypeError,
            f"dequantize: codes {rule}",
            id=f"dequantize-{str(d)[6:]}",
        )
        for d in (F32, I64, torch.bool)
    ]
    return narrow + wrong


def other_errors() -> list:
    mask = torch.uint8
    back = native.fake_quant_backward
    nibbles = lambda m, *n: ops.dequantize_int4(m(*n, dtype=torch.uint8), [3, 3], m(1))  # noqa: E731
    table = {
        "int4_signed": (
            lambda m: ops.quantize_int4(m(4), m(1), None, -8, 15),
            ValueError,
            r"quantize_int4: qmin and qmax must lie in \[-8, 7\] \(signed\) or in \[0, 15\] \(unsigned\), got \[-8, 15\]; "
            r"use quantize\(\) for wider integers",
        ),
        "int4_unsigned": (
            lambda m: ops.quantize_int4(m(4), m(1), None, 0, 16),
            ValueError,
            r"quantize_int4: qmin and qmax must lie in .*, got \[0, 16\]",
        ),
        "int4_low": (lambda m: ops.quantize_int4(m(4), m(1), None, -9, 7), ValueError, r"got \[-9, 7\]"),
        "packed_dtype": (
            lambda m: ops.dequantize_int4(m(2, dtype=torch.int8), [4], m(1)),
            TypeError,
            r"dequantize_int4: packed must be uint8, got Char; pass the result of quantize_int4\(\)",
        ),
        "packed_short": (
            lambda m: nibbles(m, 4),
            ValueError,
            r"dequantize_int4: packed must have one byte per two elements, 5 for size \[3, 3\], got shape \[4\]; "
            r"pass the result of quantize_int4\(\)",
        ),
        "packed_long": (lambda m: nibbles(m, 6), ValueError, r"5 for size \[3, 3\], got shape \[6\]"),
        "packed_dims": (lambda m: nibbles(m, 5, 1), ValueError, r"5 for size \[3, 3\], got shape \[5, 1\]"),
        "packed_size": (
            lambda m: ops.dequantize_int4(m(0, dtype=torch.uint8), [-1, 0], m(1)),
            ValueError,
            r"dequantize_int4: size must not be negative, got \[-1, 0\]",
        ),
        "packed_to_int": (
            lambda m: ops.dequantize_int4(m(2, dtype=torch.uint8), [4], m(1), dtype=I32),
            TypeError,
            "dequantize_int4: dtype must be float32, float64, bfloat16 or float16, got Int",
        ),
        "minmax_blocks": (
            lambda m: ops.minmax(m(4, 3), axis=1, block_size=2),
            ValueError,
            r"minmax: block_size must divide x.size\(1\) = 3, got 2",
        ),
        "observe_blocks": (
            lambda m: ops.observe_minmax_(m(4, 6), m(6), m(8), axis=1, block_size=3),
            ValueError,
            r"observe_minmax_: lo must have 8 elements, one per block, got 6 \(shape \[6\]\)",
        ),
        "dequantize_to_int": (
            lambda m: ops.dequantize(m(4, dtype=torch.int8), m(1), dtype=I32),
            TypeError,
            "dequantize: dtype must be float32, float64, bfloat16 or float16, got Int",
        ),
        "minmax_of_nothing": (
            lambda m: ops.minmax(m(0, 3)),
            ValueError,
            r"minmax: x must have at least one element, got shape \[0, 3\]",
        ),
        "minmax_axis": (lambda m: ops.minmax(m(4, 3), axis=5), ValueError, r"minmax: axis must lie in \[-2, 1\]"),
        "minmax_group": (
            lambda m: ops.minmax(m(4, 3), axis=1, group=3),
            ValueError,
            r"minmax: group must divide x.size\(0\) = 4, got 3",
        ),
        "observe_axis": (lambda m: observe(m, axis=-3), ValueError, r"observe_minmax_: axis must lie in \[-2, 1\]"),
        "observe_group": (
            lambda m: observe(m, group=-1),
            ValueError,
            "observe_minmax_: group must be at least 1, got -1",
        ),
        "observe_lo": (
            lambda m: observe(m, lo=(4,)),
            ValueError,
            r"observe_minmax_: lo must have 6 elements, one per channel, got 4 \(shape \[4\]\)",
        ),
        "observe_hi": (
            lambda m: observe(m, hi=(1,)),
            ValueError,
            "observe_minmax_: hi must have 6 elements, one per channel, got 1",
        ),
        "observe_per_tensor": (
            lambda m: observe(m, axis=None),
            ValueError,
            "observe_minmax_: lo must have 1 elements?, one per channel, got 6",
        ),
        "observe_dtype": (
            lambda m: observe(m, kept=(BF16, BF16)),
            TypeError,
            "observe_minmax_: lo must be float32 or float64, got BFloat16",
        ),
        "observe_dtypes": (
            lambda m: observe(m, kept=(F32, F64)),
            TypeError,
            "observe_minmax_: lo and hi must have the same dtype, got Float and Double",
        ),
        "observe_stepped": (
            lambda m: ops.observe_minmax_(m(4, 6), m(12)[::2], m(6), axis=1),
            ValueError,
            "observe_minmax_: lo must be contiguous",
        ),
        "grad_shape": (
            lambda m: learned(m, grad=(6, 4)),
            ValueError,
            r"fake_quant_learned_backward: grad must have the shape of x, \[4, 6\], got \[6, 4\]",
        ),
        "mask_dtype": (
            lambda m: back(m(9), m(2, dtype=torch.int8), []),
            TypeError,
            "fake_quant_backward: mask must be uint8, got Char",
        ),
        "mask_short": (
            lambda m: back(m(9), m(1, dtype=mask), []),
            ValueError,
            r"fake_quant_backward: mask must have one bit per element, 2 bytes, got shape \[1\]",
        ),
        "mask_empty": (lambda m: back(m(9), m(0, dtype=mask), []), ValueError, "one bit per element, 2 bytes"),
        "mask_dims": (lambda m: back(m(9), m(2, 1, dtype=mask), []), ValueError, "one bit per element, 2 bytes"),
        "mask_stepped": (
            lambda m: back(m(9), m(4, dtype=mask)[::2], []),
            ValueError,
            "fake_quant_backward: mask must be contiguous",
        ),
        "order_short": (
            lambda m: back(m(3, 3), m(2, dtype=mask), [0]),
            ValueError,
            r"order must be empty or name each of the 2 dimensions once, got \[0\]",
        ),
        "order_twice": (
            lambda m: back(m(3, 3), m(2, dtype=mask), [0, 0]),
            ValueError,
            "name each of the 2 dimensions once",
        ),
        "order_long": (
            lambda m: back(m(3, 3), m(2, dtype=mask), [0, 1, 1]),
            ValueError,
            "name each of the 2 dimensions once",
        ),
        "order_range": (
            lambda m: back(m(3, 3), m(2, dtype=mask), [0, 2]),
            ValueError,
            "name each of the 2 dimensions once",
        ),
        "order_negative": (
            lambda m: back(m(3, 3), m(2, dtype=mask), [0, -1]),
            ValueError,
            "name each of the 2 dimensions once",
        ),
    }
    for value in (0.0, -0.1, 1.5, float("nan"), float("inf")):
        sentence = rf"observe_minmax_: momentum must lie in \(0, 1\] or be None, got {value:g}"
        table[f"momentum_{value}"] = (lambda m, v=value: observe(m, momentum=v), ValueError, sentence)
    return [pytest.param(*row, id=name) for name, row in table.items()]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [*grid_errors(), *range_errors(), *input_dtype_errors(), *code_errors(), *other_errors()],
)
def test_error(call, error, sentence, device):
    with pytest.raises(error, match=sentence) as caught:
        call(Maker(device))
    assert type(caught.value) is error
    assert caught.value.args[0].split("\n")[0].rstrip().endswith(".")


@pytest.mark.parametrize("swap", [False, True], ids=["cpu_x", "meta_x"])
@pytest.mark.parametrize("op", ["fake_quant", "quantize", "dequantize", "zero_point", "lo", "hi", "grad", "mask"])
def test_devices_that_differ(op, swap):
    near, far = (Maker(d) for d in (("meta", "cpu") if swap else ("cpu", "meta")))
    ranges = {"lo": (far(6), near(6)), "hi": (near(6), far(6))}
    calls = {
        "fake_quant": lambda: ops.fake_quant(near(4, 6), far(1)),
        "quantize": lambda: ops.quantize(near(4, 6), far(1)),
        "dequantize": lambda: ops.dequantize(near(4, 6, dtype=torch.int8), far(1)),
        "zero_point": lambda: ops.fake_quant(near(4, 6), near(1), far(1)),
        "lo": lambda: ops.observe_minmax_(near(4, 6), *ranges["lo"], axis=1),
        "hi": lambda: ops.observe_minmax_(near(4, 6), *ranges["hi"], axis=1),
        "grad": lambda: native.fake_quant_learned_backward(far(4, 6), near(4, 6), near(1), None, -8, 7),
        "mask": lambda: native.fake_quant_backward(near(8), far(1, dtype=torch.uint8), []),
    }
    argument = op if op in ("zero_point", "lo", "hi", "grad", "mask") else "scale"
    with pytest.raises(
        ValueError, match=f"{argument} must be on the device of the input, {near.device}, got {far.device}"
    ):
        calls[op]()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_tensors_that_are_not_dense(layout):
    x = getattr(torch.ones(4, 4), layout)()
    for call in (
        lambda: ops.fake_quant(x, torch.ones(1)),
        lambda: ops.quantize(x, torch.ones(1)),
        lambda: ops.minmax(x),
    ):
        with pytest.raises((TypeError, NotImplementedError), match="dense tensor|backend"):
            call()


@pytest.mark.parametrize("wrong", [None, 0.1, [0.1], "0.1"], ids=repr)
def test_arguments_that_are_no_tensors(wrong):
    for call in (
        lambda: ops.fake_quant(torch.ones(3), wrong),
        lambda: ops.fake_quant(wrong, torch.ones(1)),
        lambda: ops.quantize(torch.ones(3), wrong),
        lambda: ops.minmax(wrong),
        lambda: ops.observe_minmax_(torch.ones(3), wrong, torch.ones(1)),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call()


@pytest.mark.parametrize("zero", [(0, 3), (3, 0)])
def test_channels_that_are_none(zero):
    """A scale of no elements for no channels is right, and every op gives an empty result."""
    x, axis = torch.ones(zero, requires_grad=True), zero.index(0)
    scale, z = torch.ones(0, requires_grad=True), torch.ones(0, requires_grad=True)
    y = ops.fake_quant(x, scale, z, axis=axis)
    y.sum().backward()
    assert y.shape == x.grad.shape == zero
    assert scale.grad.shape == z.grad.shape == (0,)
    ops.observe_minmax_(x.detach(), torch.ones(0), torch.ones(0), axis=axis)
    assert ops.quantize(x, scale, z, axis=axis).shape == zero
