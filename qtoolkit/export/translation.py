"""Translation of fake_quant to ONNX for both of torch's exporters: QuantizeLinear, Clip where needed, DequantizeLinear.

Codes narrower than their storage type are clipped between the two nodes, so that the file saturates at the same codes as
training. The scales of a grouped transposed convolution vary along two dimensions of its weight, which the axis attribute
cannot express: the weight is reshaped to (groups * out, in * k...) before the two nodes, and back after them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx_ir
import onnxscript
import torch

from qtoolkit.quantizers.bias import LARGEST_CODE
from qtoolkit.quantizers.frozen import code_dtype

OP = "qtoolkit::fake_quant"
BLOCKS_OPSET = 21  # the first whose QuantizeLinear has block_size


def smallest_opset(qmin: int, qmax: int, block_size: int = 0) -> int:
    """Return the first ONNX opset whose QuantizeLinear supports the dtype of these codes, and blocks if block_size > 0.

    Example:
        >>> smallest_opset(-8, 7), smallest_opset(0, 65535), smallest_opset(-8, 7, block_size=32)
        (13, 21, 21)
    """
    return 13 if code_dtype(qmin, qmax) in (torch.int8, torch.uint8) and block_size == 0 else BLOCKS_OPSET


class _GridArguments(NamedTuple):
    """The arguments of fake_quant that define the range of codes and which elements share a scale."""

    qmin: int
    qmax: int
    axis: int | None
    group: int
    block_size: int


class _Writer(Protocol):
    """Writes nodes in one exporter."""

    @property
    def version(self) -> int: ...

    def node(self, op_type: str, *inputs: Any, **attributes: Any) -> Any: ...

    def constant(self, value: np.ndarray[Any, Any]) -> Any: ...

    def shape(self, value: Any) -> Sequence[int]: ...

    def dtype(self, value: Any) -> onnx_ir.DataType: ...


@dataclass(frozen=True)
class _OnnxscriptWriter:
    """Writes nodes with onnxscript, for the torch.export-based exporter."""

    opset: Any

    @property
    def version(self) -> int:
        return int(self.opset.version)

    def node(self, op_type: str, *inputs: Any, **attributes: Any) -> Any:
        return getattr(self.opset, op_type)(*inputs, **attributes)

    def constant(self, value: np.ndarray[Any, Any]) -> Any:
        return self.opset.Constant(value=onnx_ir.tensor(value))

    def shape(self, value: Any) -> Sequence[int]:
        return [int(d) for d in value.shape]

    def dtype(self, value: Any) -> onnx_ir.DataType:
        return onnx_ir.DataType(value.dtype)


@dataclass(frozen=True)
class _TorchScriptWriter:
    """Writes nodes with the graph context of the TorchScript exporter."""

    graph: Any
    version: int

    def node(self, op_type: str, *inputs: Any, **attributes: Any) -> Any:
        kinds = {int: "i", list: "i", onnx_ir.DataType: "i"}
        return self.graph.op(op_type, *inputs, **{f"{k}_{kinds[type(v)]}": v for k, v in attributes.items()})

    def constant(self, value: np.ndarray[Any, Any]) -> Any:
        return self.graph.op("Constant", value_t=torch.from_numpy(value))

    def shape(self, value: Any) -> Sequence[int]:
        return [int(d) for d in value.type().sizes()]

    def dtype(self, value: Any) -> onnx_ir.DataType:
        names = {"Float": "FLOAT", "Double": "DOUBLE", "Half": "FLOAT16", "BFloat16": "BFLOAT16"}
        return onnx_ir.DataType[names[value.type().scalarType()]]


def translation_table(opset: int) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return the `custom_translation_table` of torch.onnx.export for one opset.

    Example:
        >>> list(translation_table(18))
        [<OpOverload(op='qtoolkit.fake_quant', overload='default')>]
    """
    writer = _OnnxscriptWriter(getattr(onnxscript, f"opset{opset}"))

    def fake_quant(
        x: Any,
        scale: Any,
        zero_point: Any,
        qmin: int,
        qmax: int,
        axis: int | None = None,
        group: int = 1,
        block_size: int = 0,
        grad_factor: float = 1.0,
        mask: bool = False,
    ) -> Any:
        """Write one call. The exporter matches these parameters with the op's schema, so all are listed."""
        grid = _GridArguments(qmin, qmax, axis, group, block_size)
        return _lower(writer, x, scale, zero_point, grid), _no_mask(writer)

    return {torch.ops.qtoolkit.fake_quant.default: fake_quant}


def register_symbolic(opset: int) -> None:
    """Register the translation of the op with the TorchScript exporter for one opset."""
    from torch.onnx import symbolic_helper

    @symbolic_helper.parse_args("v", "v", "v", "i", "i", "i", "i", "i", "f", "b")
    def fake_quant(
        g: Any,
        x: Any,
        scale: Any,
        zero_point: Any,
        qmin: int,
        qmax: int,
        axis: int | None,
        group: int,
        block_size: int,
        factor: float,
        mask: bool,
    ) -> Any:
        """Write one call. The exporter passes the op's arguments by position, so all are listed."""
        writer, grid = _TorchScriptWriter(g, opset), _GridArguments(qmin, qmax, axis, group, block_size)
        absent = zero_point.node().mustBeNone()
        y = _lower(writer, x, scale, None if absent else zero_point, grid)
        return y.setType(x.type()), _no_mask(writer)

    torch.onnx.register_custom_op_symbolic(OP, fake_quant, opset)  # type: ignore[attr-defined]


def _no_mask(writer: _Writer) -> Any:
    return writer.constant(np.zeros(0, np.uint8))


def _lower(writer: _Writer, x: Any, scale: Any, zero_point: Any, grid: _GridArguments) -> Any:
    given = writer.dtype(x)
    if given != onnx_ir.DataType.FLOAT:
        x = writer.node("Cast", x, to=onnx_ir.DataType.FLOAT)
    if grid.group > 1:
        shape = list(writer.shape(x))
        rows = _to_rows(writer, x, shape, grid.group)
        y = _from_rows(writer, _pair(writer, rows, scale, zero_point, grid, {"axis": 0}), shape, grid.group)
    elif grid.axis is None:
        y = _pair(writer, x, scale, zero_point, grid, {})
    elif grid.block_size > 0:
        _check_blocks(writer, x, scale, grid.axis, grid.block_size)
        y = _pair(writer, x, scale, zero_point, grid, {"axis": grid.axis, "block_size": grid.block_size})
    else:
        y = _pair(writer, x, scale, zero_point, grid, {"axis": grid.axis})
    return y if given == onnx_ir.DataType.FLOAT else writer.node("Cast", y, to=given)


def _pair(
    writer: _Writer, x: Any, scale: Any, zero_point: Any, grid: _GridArguments, attributes: Mapping[str, int]
) -> Any:
    ends = (grid.qmin, grid.qmax)
    if ends == (-LARGEST_CODE, LARGEST_CODE):
        return _bias(writer, x, scale, attributes)
    dtype = code_dtype(*ends)
    numpy_dtype: Any = np.dtype(str(dtype).removeprefix("torch."))
    if zero_point is None:
        zero_point = writer.constant(np.zeros(list(writer.shape(scale)), numpy_dtype))
    else:
        zero_point = writer.node("Cast", zero_point, to=onnx_ir.DataType.from_numpy(numpy_dtype))
    codes = writer.node("QuantizeLinear", x, scale, zero_point, **attributes)
    info = torch.iinfo(dtype)
    if ends != (info.min, info.max):
        codes = _clip(writer, codes, ends, numpy_dtype)
    return writer.node("DequantizeLinear", codes, scale, zero_point, **attributes)


def _bias(writer: _Writer, x: Any, scale: Any, attributes: Mapping[str, int]) -> Any:
    """Write a bias as int32 codes: QuantizeLinear has none, so these nodes compute them, and the exporter folds them."""
    codes = writer.node("Round", writer.node("Div", x, scale))
    ends = (writer.constant(np.array(end, np.float32)) for end in (-LARGEST_CODE, LARGEST_CODE))
    codes = writer.node("Cast", writer.node("Clip", codes, *ends), to=onnx_ir.DataType.INT32)
    return writer.node("DequantizeLinear", codes, scale, **attributes)


def _check_blocks(writer: _Writer, x: Any, scale: Any, axis: int, block_size: int) -> None:
    if writer.version < BLOCKS_OPSET:
        raise ValueError(
            f"export_onnx: block_size={block_size} (a group_size) needs opset {BLOCKS_OPSET} or newer, got {writer.version}; "
            f"pass opset={BLOCKS_OPSET} and exporter='dynamo'."
        )
    blocks = list(writer.shape(x))
    blocks[axis] //= block_size
    if list(writer.shape(scale)) != blocks:
        raise ValueError(
            f"export_onnx: with block_size={block_size}, the scale of fake_quant must have the shape of the blocks, {blocks}, "
            f"got {list(writer.shape(scale))}; reshape it."
        )


def _clip(writer: _Writer, codes: Any, ends: tuple[int, int], dtype: Any) -> Any:
    if np.dtype(dtype).itemsize == 1:
        return writer.node("Clip", codes, *(writer.constant(np.array(end, dtype)) for end in ends))
    # onnxruntime's Clip does not support 16-bit integers.
    wide = writer.node("Cast", codes, to=onnx_ir.DataType.INT32)
    clipped = writer.node("Clip", wide, *(writer.constant(np.array(end, np.int32)) for end in ends))
    return writer.node("Cast", clipped, to=onnx_ir.DataType.from_numpy(np.dtype(dtype)))


def _to_rows(writer: _Writer, x: Any, shape: list[int], group: int) -> Any:
    inputs, outputs = shape[0] // group, shape[1]
    x = writer.node("Reshape", x, writer.constant(np.array([group, inputs, outputs, -1])))
    x = writer.node("Transpose", x, perm=[0, 2, 1, 3])
    return writer.node("Reshape", x, writer.constant(np.array([group * outputs, -1])))


def _from_rows(writer: _Writer, y: Any, shape: list[int], group: int) -> Any:
    inputs, outputs = shape[0] // group, shape[1]
    y = writer.node("Reshape", y, writer.constant(np.array([group, outputs, inputs, -1])))
    y = writer.node("Transpose", y, perm=[0, 2, 1, 3])
    return writer.node("Reshape", y, writer.constant(np.array(shape)))
