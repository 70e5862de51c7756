"""Packed codes of 4 bits: against NumPy, and against the packing of onnx and ml_dtypes. All comparisons are exact."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from qtoolkit import ops
from qtoolkit.quantizers.codes import TensorCodes
from tests import reference
from tests.cases import (
    BLOCKS,
    FLOATS,
    SIZES,
    SPECIAL,
    Channels,
    any_grid,
    any_tensor,
    assert_same,
    floats,
    layout_cases,
    name_of,
    scales,
    zero_points,
)

ENDS = {True: (-8, 7), False: (0, 15)}
IN_MEMORY = {
    "row": lambda make: make(1027),
    "matrix": lambda make: make(5, 7),
    "image": lambda make: make(2, 6, 5, 7),
    "image_last": lambda make: make(2, 6, 5, 7).contiguous(memory_format=torch.channels_last),
    "two_channels_last": lambda make: make(3, 2, 3, 5).contiguous(memory_format=torch.channels_last),
    "odd_channels_last": lambda make: make(2, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    "points_last": lambda make: make(3, 6, 1, 1).contiguous(memory_format=torch.channels_last),
    "volume_last": lambda make: make(2, 4, 3, 2, 5).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda make: make(6, 4).t(),
    "sliced": lambda make: make(4, 6, 9)[:, ::2],
    "scalar": lambda make: make(),
    "empty": lambda make: make(0, 4),
    "large": lambda make: make(2, 8, 129, 131),
}


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte in row-major order, the first in the low half."""
    flat = codes.contiguous().reshape(-1).numpy().astype(np.int64) & 15
    flat = np.append(flat, 0) if flat.size % 2 else flat
    return torch.from_numpy((flat[::2] + 16 * flat[1::2]).astype(np.uint8))


def packed_in_memory(codes: Tensor) -> Tensor:
    """Two codes a byte as layers take them, where that is their order in memory; else empty."""
    if codes.is_contiguous():
        return packed(codes)
    if codes.dim() != 4 or codes.shape[1] % 2 or not codes.is_contiguous(memory_format=torch.channels_last):
        return torch.empty(0, dtype=torch.uint8)
    n, c, h, w = codes.shape
    return packed(codes.permute(0, 2, 3, 1)).view(n, h, w, c // 2).permute(0, 3, 1, 2)


def check(x: Tensor, scale: Tensor, zero_point: Tensor | None, channels: Channels, signed: bool) -> None:
    codes = reference.quantize(x, scale, zero_point, *ENDS[signed], torch.int8, **channels.named)
    found = ops.quantize_int4(x, scale, zero_point, *ENDS[signed], **channels.named)
    assert_same(found, packed(codes))
    values = ops.dequantize_int4(found, x.shape, scale, zero_point, signed, **channels.named, dtype=x.dtype)
    assert_same(values, reference.dequantize(codes, scale, zero_point, x.dtype, **channels.named))
    assert values.is_contiguous()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("layout", "channels"), layout_cases())
def test_every_layout(layout, channels, dtype):
    x = layout(floats(dtype))
    count = channels.count(x)
    for signed in ENDS:
        check(x, 10 * scales(count), None, channels, signed)
        check(x, 10 * scales(count), zero_points(count), channels, signed)


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
@pytest.mark.parametrize("signed", ENDS)
def test_blocks(block, signed):
    sizes, axis, size = block
    x, channels = floats(torch.float32)(*sizes), Channels(axis, 1, size)
    check(x, 10 * scales(channels.count(x)), None, channels, signed)


@pytest.mark.parametrize("size", [0, 2, 3, *SIZES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_sizes(size, dtype):
    for signed in ENDS:
        check(floats(dtype)(size), 10 * scales(1), zero_points(1), Channels(), signed)


@given(st.data())
def test_anything(data):
    x = data.draw(any_tensor())
    scale, zero_point, channels = data.draw(any_grid(x))
    check(x, scale, zero_point, channels, data.draw(st.booleans()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_do_not_depend_on_threads(count, threads):
    threads(count)
    check(floats(torch.float32)(301, 777), 10 * scales(301), None, Channels(0), True)


def test_every_pair_of_codes():
    every = torch.arange(256, dtype=torch.uint8)
    for signed, (low, high) in ENDS.items():
        values = ops.dequantize_int4(every, [16, 32], torch.tensor(1.0), None, signed)
        assert (values.min(), values.max()) == (low, high)
        assert torch.equal(ops.quantize_int4(values, torch.tensor(1.0), None, low, high), every)


def test_the_high_half_of_an_odd_last_byte_is_zero_and_is_not_read():
    x = torch.full((67,), -1.0)
    assert ops.quantize_int4(x, torch.tensor(1.0))[-1] == 0x0F
    assert ops.dequantize_int4(torch.tensor([0xFF], dtype=torch.uint8), [1], torch.tensor(1.0)).tolist() == [-1]


def test_narrower_ranges():
    x = torch.tensor([-9.0, 9.0, torch.nan, -torch.inf])
    for low, high in ((-7, 7), (-2, 1), (3, 12)):
        codes = reference.quantize(x, torch.tensor(1.0), None, low, high)
        assert_same(ops.quantize_int4(x, torch.tensor(1.0), None, low, high), packed(codes))


def test_a_stepped_and_shifted_vector_of_bytes_is_read_as_it_is():
    wide = torch.arange(101, dtype=torch.uint8)
    for bytes in (wide[1::2], wide[3:]):
        wanted = ops.dequantize_int4(bytes.clone(), [2 * len(bytes)], torch.tensor(1.0))
        assert_same(ops.dequantize_int4(bytes, [2 * len(bytes)], torch.tensor(1.0)), wanted)


# ---- as others pack


@pytest.mark.parametrize("signed", ENDS)
@pytest.mark.parametrize("size", [6, 7])
def test_onnx_reads_and_writes_the_same_bytes(signed, size):
    kind, numpy_kind = (TensorProto.INT4, ml_dtypes.int4) if signed else (TensorProto.UINT4, ml_dtypes.uint4)
    x = torch.arange(5 * size, dtype=torch.float32).view(5, size) % 16 + ENDS[signed][0]
    ours = ops.quantize_int4(x, torch.tensor(1.0), None, *ENDS[signed])
    theirs = helper.make_tensor("codes", kind, x.shape, x.numpy().astype(numpy_kind).reshape(-1))
    assert (theirs.raw_data or bytes(b & 255 for b in theirs.int32_data)) == ours.numpy().tobytes()
    assert numpy_helper.from_array(x.numpy().astype(numpy_kind)).raw_data == ours.numpy().tobytes()
    stored = helper.make_tensor("codes", kind, x.shape, ours.numpy().tobytes(), raw=True)
    assert np.array_equal(numpy_helper.to_array(stored).astype(np.float32), x.numpy())


def onnxruntime(op: str, x: Tensor, stored: bytes, scale: Tensor, signed: bool, axis: int, block_size: int) -> Tensor:
    """QuantizeLinear (of x) and then DequantizeLinear, or DequantizeLinear of stored codes, blocked, of opset 21."""
    kind = TensorProto.INT4 if signed else TensorProto.UINT4
    constants = [
        numpy_helper.from_array(scale.numpy(), "scale"),
        helper.make_tensor("zero_point", kind, scale.shape, bytes((scale.numel() + 1) // 2), raw=True),
        helper.make_tensor("stored", kind, x.shape, stored, raw=True),
    ]
    blocks = {"axis": axis, "block_size": block_size}
    nodes = [helper.make_node("DequantizeLinear", ["codes", "scale", "zero_point"], ["y"], **blocks)]
    if op == "QuantizeLinear":
        nodes.insert(0, helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["codes"], **blocks))
    else:
        nodes[0].input[0] = "stored"
    graph = helper.make_graph(
        nodes,
        "blocked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
@pytest.mark.parametrize("signed", ENDS)
@pytest.mark.parametrize(("sizes", "axis"), [((6, 96), 1), ((32, 7), 0), ((3, 64, 3, 3), 1)])
def test_onnxruntime_reads_the_codes_and_computes_the_same(op, signed, sizes, axis):
    x = floats(torch.float32)(*sizes)
    shape = [n // 16 if d == axis else n for d, n in enumerate(sizes)]
    scale = 10 * scales(x.numel() // 16).view(shape)
    stored = ops.quantize_int4(x, scale, None, *ENDS[signed], axis=axis, block_size=16)
    ours = ops.dequantize_int4(stored, sizes, scale, None, signed, axis=axis, block_size=16)
    assert_same(ours, onnxruntime(op, x, stored.numpy().tobytes(), scale, signed, axis, 16))


@pytest.mark.parametrize("signed", ENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", IN_MEMORY)
def test_values_come_with_packed_codes(layout, dtype, signed):
    """The op of a quantizer writes both in one pass; the codes are those that `TensorCodes` makes of the values."""
    x = IN_MEMORY[layout](floats(dtype)).clone()
    flat = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)[: len(flat)]
    scale = 10 * scales(1)
    for zero_point in (None, torch.tensor([3.0])):
        arguments = (scale, None, None, zero_point, *ENDS[signed], 1.0, False, False, True)
        y, codes, *_ = torch.ops.qtoolkit.function_fake_quant(x, "none", [], None, None, 0.0, False, *arguments)
        assert_same(y, ops.fake_quant(x, scale, zero_point, *ENDS[signed]))
        wanted = packed_in_memory(ops.quantize(x, scale, zero_point, *ENDS[signed]).to(torch.int8))
        assert_same(codes, wanted)
        assert codes.numel() == 0 or codes.stride() == wanted.stride()
        later = TensorCodes(scale, zero_point, *ENDS[signed], True, y, 0).completed(y, False).codes
        assert codes.numel() == 0 or (torch.equal(codes, later) and codes.stride() == later.stride())
