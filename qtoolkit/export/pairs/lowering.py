"""Replace the placeholders of `qtoolkit.export.exporters.translation` by Q/DQ pairs in the file's opset."""

import numpy as np
import onnx_ir
from onnx_ir import DataType

from qtoolkit.errors import present
from qtoolkit.export.exporters.translation import DOMAIN, QUANTIZER, placeholders_in, rounding_of
from qtoolkit.export.files.graph import Constants, constant_of, input_at, replace_node
from qtoolkit.export.files.quantizer_nodes import node_name
from qtoolkit.export.pairs.pair_form import Attribute, PairForm
from qtoolkit.export.pairs.storage import POWERS_OPSET, SUMS, code_array, exact_in, storage_of
from qtoolkit.runtimes.execution import Array

HALF_OPSET = 19  # the first whose QuantizeLinear takes float16 and bfloat16
MIXED_OPSET = 23  # the first whose nodes take a scale of another type than their input's, and a type to divide in


def lower(model: onnx_ir.Model, opset: int, integer_weights: bool) -> None:
    """Replace all placeholders in a model of this opset. Raises ValueError: a shape does not fit ONNX's nodes.

    With `integer_weights` constants are stored as integers, with only a DequantizeLinear.
    """
    constants = Constants(model.graph)
    for node in placeholders_in(model):
        _Lowering(node, opset, constants).replace(integer_weights)
    model.opset_imports.pop(DOMAIN, None)


class _Lowering(PairForm[onnx_ir.Value]):
    """Writes the nodes of one placeholder."""

    def __init__(self, node: onnx_ir.Node, opset: int, constants: Constants) -> None:
        super().__init__(rounding_of(node), list(node.attributes.get_ints("shape", ()) or ()))
        self.node, self.opset, self.constants = node, opset, constants
        self.name = node.attributes.get_string(QUANTIZER)
        self.dtype = DataType(present(node.attributes.get_int("dtype"), f"the type of {node.name!r}"))
        self.x, self.scale = (present(value, f"an input of {node.name!r}") for value in node.inputs[:2])
        self.zero_point = input_at(node, 2)
        self.nodes: list[onnx_ir.Node] = []

    def replace(self, integer_weights: bool) -> None:
        self.check_blocks(self.opset, _sizes(self.scale))
        grid = [value for value in (self.scale, self.zero_point) if value is not None]
        stored = all(_constant(value) is not None for value in grid) and (integer_weights or self.code_range == SUMS)
        values = _constant(self.x)
        constant = values if stored else None
        kind = {"constant": constant is not None, "computed": values is None}
        self.storage = storage_of(self.format, *self.code_range, self.opset, **kind)
        replace_node(self.node, self.nodes, self._pair(constant))

    def _pair(self, constant: Array | None) -> onnx_ir.Value:
        arithmetic = self._arithmetic()
        scale = self._scale(arithmetic)
        grid = (scale,) if self.code_range == SUMS else (scale, self._zero_points())
        mixed = scale.dtype != arithmetic
        if constant is None:
            x = self.x if arithmetic == self.dtype else self.node_of("Cast", self.x, to=arithmetic)
            # From this opset on, the division is in the scale's type by default; quantizers divide in float32.
            divides = mixed or (arithmetic != DataType.FLOAT and self.opset >= MIXED_OPSET)
            codes = self.codes(x, grid, {"precision": DataType.FLOAT} if divides else {})
        else:
            codes = self._stored(constant)
        y = self.values(codes, grid, {"output_dtype": arithmetic} if mixed else {})
        return y if arithmetic == self.dtype else self.node_of("Cast", y, to=self.dtype)

    def _arithmetic(self) -> DataType:
        """Return the type of the pair's input and output.

        Quantizers compute in float32 (see `qtoolkit.ops`). Nodes in half precision give the same quantized values if the scale
        is exact in it, or if they accept a float32 scale (onnxruntime does not for float16).
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

    def _zero_points(self) -> onnx_ir.Value:
        dtype, name = self.storage.dtype, f"{self.scale.name}.zero"
        if self.zero_point is None:
            scale = _constant(self.scale)
            sizes = _sizes(self.scale) if scale is None else scale.shape
            return self.constants.shared(np.zeros(sizes, np.float32), dtype, name)
        zero_point = _constant(self.zero_point)
        if zero_point is None:
            return self.node_of("Cast", self.zero_point, to=dtype)
        return self.constants.shared(zero_point, dtype, name)

    def _stored(self, constant: Array) -> onnx_ir.Value:
        zero_point = None if self.zero_point is None else _constant(self.zero_point)
        scale = present(_constant(self.scale), f"the constant {self.scale.name!r}")
        if self.group > 1:
            constant = _as_rows(constant, self.group)
        codes = code_array(constant, scale, zero_point, self.storage, self.axis, self.block_size)
        return self.constants.add(codes, self.storage.dtype, f"{self.x.name}.codes")

    def constant(self, array: Array, dtype: DataType, name: str) -> onnx_ir.Value:
        return self.constants.shared(array, dtype, name)

    def node_of(self, op_type: str, *inputs: onnx_ir.Value, role: str = "", **attributes: Attribute) -> onnx_ir.Value:
        values = {key: int(value) if isinstance(value, DataType) else value for key, value in attributes.items()}
        name = node_name(self.name, role) if self.name is not None and role else None
        output = f"{self.node.outputs[0].name}.{len(self.nodes)}"
        node = onnx_ir.node(op_type, inputs, values, name=name, outputs=[onnx_ir.Value(name=output)])
        self.nodes.append(node)
        return node.outputs[0]


def _constant(value: onnx_ir.Value) -> Array | None:
    """Return a constant, cast to float32 from half precision; None for a computed value."""
    found = None if value.is_graph_input() else constant_of(value)
    return None if found is None else np.asarray(found, np.float32)


def _sizes(value: onnx_ir.Value) -> list[int]:
    return [size for size in value.shape or () if isinstance(size, int)]


def _as_rows(weight: Array, group: int) -> Array:
    """Return a weight (in, out / groups, k...) with one row per output channel: (out, in / groups * k...)."""
    grouped = weight.reshape(group, weight.shape[0] // group, weight.shape[1], -1)
    return grouped.transpose(0, 2, 1, 3).reshape(group * weight.shape[1], -1)
