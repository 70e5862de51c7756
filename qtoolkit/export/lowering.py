"""Placeholders of `qtoolkit.export.translation` become QuantizeLinear and DequantizeLinear in the file's opset.

Codes narrower than their storage type are clipped between the two nodes, so that the file saturates at the same codes as
training. The scales of a grouped transposed convolution vary along two dimensions of its weight, which the axis attribute
cannot express: the weight is reshaped to (groups * out, in * k...) before the two nodes, and back after them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir import DataType

from qtoolkit.errors import present
from qtoolkit.export.storage import BLOCKS_OPSET, POWERS_OPSET, SUMS, Array, code_array, exact_in, storage_of, tensor
from qtoolkit.export.translation import DOMAIN, QUANTIZER

HALF_OPSET = 19  # the first whose QuantizeLinear takes float16 and bfloat16
MIXED_OPSET = 23  # the first whose nodes take a scale of another type than their input's


def lower(model: onnx_ir.Model, opset: int, integer_weights: bool) -> None:
    """Replace all placeholders.

    Args:
        model: A model of this opset.
        opset: ONNX opset.
        integer_weights: Whether the codes of constants are stored, with DequantizeLinear alone.

    Raises:
        ValueError: A shape does not fit ONNX's nodes.
    """
    constants = Constants(model.graph)
    for node in list(onnx_ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain == DOMAIN:
            _Lowering(node, opset, constants).replace(integer_weights)
    model.opset_imports.pop(DOMAIN, None)


def unused_name(graph: onnx_ir.Graph, name: str) -> str:
    """Return this name, with a number if a constant of the graph has it."""
    unique, number = name, 1
    while unique in graph.initializers:
        number += 1
        unique = f"{name}_{number}"
    return unique


class Constants:
    """The constants that are added to a graph: `shared` ones that are equal once."""

    def __init__(self, graph: onnx_ir.Graph) -> None:
        self.graph = graph
        self.known: dict[tuple[Any, ...], onnx_ir.Value] = {}

    def shared(self, array: Array, dtype: DataType, name: str) -> onnx_ir.Value:
        """Return a small constant, which has this name if it is new."""
        key = (dtype, array.shape, array.tobytes())
        if key not in self.known:
            self.known[key] = self.add(array, dtype, name)
        return self.known[key]

    def add(self, array: Array, dtype: DataType, name: str) -> onnx_ir.Value:
        """Return a new constant, named like this."""
        unique = unused_name(self.graph, name)
        value = onnx_ir.val(unique, dtype, array.shape, const_value=tensor(array, dtype, unique))
        self.graph.register_initializer(value)
        return value


class _Lowering:
    """Writes the nodes of one placeholder.

    Args:
        node: The placeholder.
        opset: ONNX opset.
        constants: The constants of the graph.
    """

    def __init__(self, node: onnx_ir.Node, opset: int, constants: Constants) -> None:
        given = {key: attribute.value for key, attribute in node.attributes.items()}
        self.node, self.opset, self.constants, self.name = node, opset, constants, given.get(QUANTIZER)
        self.format, self.ends = given["format"], (given["qmin"], given["qmax"])
        self.dtype, self.shape = DataType(given["dtype"]), list(given.get("shape", ()))
        self.group, self.block_size = given.get("group", 1), given.get("block_size", 0)
        self.axis = 0 if self.group > 1 else given.get("axis")  # of the rows
        self.x, self.scale = (present(value, f"an input of {node.name!r}") for value in node.inputs[:2])
        self.zero_point = node.inputs[2] if len(node.inputs) > 2 else None
        self.nodes: list[onnx_ir.Node] = []

    def replace(self, integer_weights: bool) -> None:
        """Replace the placeholder by the nodes."""
        self._check_blocks()
        stored = self._is_constant_grid() and (integer_weights or self.ends == SUMS)
        constant = _constant(self.x) if stored else None
        self.storage = storage_of(self.format, *self.ends, self.opset, constant=constant is not None)
        y = self._pair(constant)
        owner = present(self.node.graph, f"the graph of {self.node.name!r}")
        onnx_ir.convenience.replace_nodes_and_values(owner, self.node, [self.node], self.nodes, self.node.outputs, [y])

    def _is_constant_grid(self) -> bool:
        return _constant(self.scale) is not None and (self.zero_point is None or _constant(self.zero_point) is not None)

    def _pair(self, constant: Array | None) -> onnx_ir.Value:
        arithmetic = self._arithmetic()
        scale = self._scale(arithmetic)
        grid = (scale,) if self.ends == SUMS else (scale, self._codes_of_zero())
        mixed = scale.dtype != arithmetic
        attributes = {} if self.axis is None else {"axis": self.axis}
        attributes |= {"block_size": self.block_size} if self.block_size > 0 else {}
        if constant is None:
            x = self.x if arithmetic == self.dtype else self._node("Cast", self.x, to=arithmetic)
            precision = {"precision": DataType.FLOAT} if mixed else {}
            codes = self._codes(self._to_rows(x), grid, {**attributes, **precision})
        else:
            codes = self._stored(constant)
        output = {"output_dtype": arithmetic} if mixed else {}
        y = self._node("DequantizeLinear", codes, *grid, role="dequantize", **attributes, **output)
        y = self._from_rows(y)
        return y if arithmetic == self.dtype else self._node("Cast", y, to=self.dtype)

    def _codes(self, x: onnx_ir.Value, grid: tuple[onnx_ir.Value, ...], attributes: Mapping[str, Any]) -> onnx_ir.Value:
        """Write the nodes that compute the codes: QuantizeLinear, but for int32, which it does not have."""
        if self.ends == SUMS:
            codes = self._node("Round", self._node("Div", x, grid[0]))
            ends = [self.constants.shared(np.array(end), DataType.FLOAT, "code_float") for end in SUMS]
            return self._node("Cast", self._node("Clip", codes, *ends), to=DataType.INT32)
        codes = self._node("QuantizeLinear", x, *grid, role="quantize", **attributes)
        return self._clip(codes) if self.storage.clips else codes

    def _arithmetic(self) -> DataType:
        """Return the type of the pair's input and output.

        Quantizers compute in float32 (see `qtoolkit.ops`). Nodes of half precision give the same codes if their scale is exact
        in it, or if they may take a float32 scale, which onnxruntime's do not for float16.
        """
        scale = _constant(self.scale)
        if scale is not None and self.opset >= HALF_OPSET and exact_in(scale, self.dtype):
            return self.dtype
        mixed = self.dtype == DataType.BFLOAT16 and self.opset >= MIXED_OPSET
        return self.dtype if mixed else DataType.FLOAT

    def _scale(self, arithmetic: DataType) -> onnx_ir.Value:
        scale = _constant(self.scale)
        if scale is None:
            return self.scale
        powers = self.format != "int" and self.block_size > 0 and self.opset >= POWERS_OPSET
        if powers and exact_in(scale, DataType.FLOAT8E8M0):
            return self.constants.shared(scale, DataType.FLOAT8E8M0, f"{self.scale.name}.powers")
        if arithmetic != DataType.FLOAT and exact_in(scale, arithmetic):
            return self.constants.shared(scale, arithmetic, f"{self.scale.name}.half")
        return self.scale

    def _codes_of_zero(self) -> onnx_ir.Value:
        dtype, of_weight = self.storage.dtype, _constant(self.x) is not None
        name = f"{(self.x if of_weight else self.scale).name}.zero"
        # Weights share none: where onnxruntime makes them uint8 (session.x64quantprecision), it fails at the second use.
        add = self.constants.add if of_weight else self.constants.shared
        if self.zero_point is None:
            scale = _constant(self.scale)
            sizes = _sizes(self.scale) if scale is None else scale.shape
            return add(np.zeros(sizes, np.float32), dtype, name)
        zero_point = _constant(self.zero_point)
        if zero_point is None:
            return self._node("Cast", self.zero_point, to=dtype)
        return add(zero_point, dtype, name)

    def _stored(self, constant: Array) -> onnx_ir.Value:
        zero_point = None if self.zero_point is None else _constant(self.zero_point)
        scale = present(_constant(self.scale), f"the constant {self.scale.name!r}")
        if self.group > 1:
            constant = _as_rows(constant, self.group)
        codes = code_array(constant, scale, zero_point, self.storage, self.axis, self.block_size)
        return self.constants.add(codes, self.storage.dtype, f"{self.x.name}.codes")

    def _clip(self, codes: onnx_ir.Value) -> onnx_ir.Value:
        # onnxruntime's Clip does not support 16-bit integers.
        wide = self.storage.dtype.itemsize > 1
        dtype = DataType.INT32 if wide else self.storage.dtype
        ends = [self.constants.shared(np.array(end), dtype, f"code_{dtype.name.lower()}") for end in self.ends]
        clipped = self._node("Clip", self._node("Cast", codes, to=dtype) if wide else codes, *ends)
        return self._node("Cast", clipped, to=self.storage.dtype) if wide else clipped

    def _check_blocks(self) -> None:
        if self.block_size == 0:
            return
        if self.opset < BLOCKS_OPSET:
            raise ValueError(
                f"export_onnx: block_size={self.block_size} (a group_size) needs opset {BLOCKS_OPSET} or newer, got "
                f"{self.opset}; pass opset={BLOCKS_OPSET}."
            )
        blocks = list(self.shape)
        blocks[self.axis] //= self.block_size  # type: ignore[index]  # blocks have an axis
        shape = _sizes(self.scale)
        if shape != blocks:
            raise ValueError(
                f"export_onnx: with block_size={self.block_size}, the scale of fake_quant must have the shape of the blocks, "
                f"{blocks}, got {shape}; reshape it."
            )

    def _to_rows(self, x: onnx_ir.Value) -> onnx_ir.Value:
        return x if self.group == 1 else self._through_rows(x, [self.group, *self._sides(), -1], [self._rows, -1])

    def _from_rows(self, y: onnx_ir.Value) -> onnx_ir.Value:
        if self.group == 1:
            return y
        return self._through_rows(y, [self.group, *reversed(self._sides()), -1], self.shape)

    def _sides(self) -> list[int]:
        """Return the input and output channels of a group of the weight."""
        return [self.shape[0] // self.group, self.shape[1]]

    @property
    def _rows(self) -> int:
        return int(self.group * self.shape[1])

    def _through_rows(self, x: onnx_ir.Value, apart: list[int], together: list[int]) -> onnx_ir.Value:
        x = self._node("Reshape", x, self._sizes(apart))
        x = self._node("Transpose", x, perm=[0, 2, 1, 3])
        return self._node("Reshape", x, self._sizes(together))

    def _sizes(self, sizes: list[int]) -> onnx_ir.Value:
        return self.constants.shared(np.array(sizes), DataType.INT64, "sizes")

    def _node(self, op_type: str, *inputs: onnx_ir.Value, role: str = "", **attributes: Any) -> onnx_ir.Value:
        values = {key: int(value) if isinstance(value, DataType) else value for key, value in attributes.items()}
        name = f"{self.name}.{role}" if self.name is not None and role else None
        output = f"{self.node.outputs[0].name}.{len(self.nodes)}"
        node = onnx_ir.node(op_type, inputs, values, name=name, outputs=[onnx_ir.Value(name=output)])
        self.nodes.append(node)
        return node.outputs[0]


def _constant(value: onnx_ir.Value) -> Array | None:
    """Return a constant, those of half precision as float32; None for a value that is computed."""
    found = onnx_ir.convenience.get_const_tensor(value)
    if found is None or value.is_graph_input():
        return None
    return np.asarray(found.numpy(), np.float32)


def _sizes(value: onnx_ir.Value) -> list[int]:
    return [size for size in value.shape or () if isinstance(size, int)]


def _as_rows(weight: Array, group: int) -> Array:
    """Return a weight (in, out / groups, k...) as rows of one output channel each: (out, in / groups * k...)."""
    grouped = weight.reshape(group, weight.shape[0] // group, weight.shape[1], -1)
    return grouped.transpose(0, 2, 1, 3).reshape(group * weight.shape[1], -1)
