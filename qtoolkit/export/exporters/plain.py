"""Translation of quantizing ops in a plain torch.onnx.export: the pairs of `qtoolkit.export_onnx`, with float weights."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from onnx_ir import DataType
from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype
from torch import Tensor, Value

from qtoolkit.errors import present, warn
from qtoolkit.export.pairs.opsets import NATIVE
from qtoolkit.export.pairs.pair_form import Attribute, PairForm
from qtoolkit.export.pairs.storage import FLOATS, SUMS, Rounding, smallest_opset, storage_of
from qtoolkit.lint.ops import BLOCKS_OPSET
from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

V = TypeVar("V")

WITHOUT_INT4 = BLOCKS_OPSET - 1  # torch has no tensors of 4 bits: their codes are stored in 8


class _Plain(PairForm[V]):
    """Writes the nodes of one call; its scale may be computed in the file."""

    def __init__(self, opset: int, how: Rounding, shape: Sequence[int]) -> None:
        super().__init__(how, shape)
        if how.format != "int" and how.format not in FLOATS:
            raise ValueError(
                f"torch.onnx.export: ONNX has no node for format={how.format!r}; use qtoolkit.export.encodings, which writes "
                "the float model and the ranges for the target's own compiler."
            )
        least = _least_opset(how)
        if opset < least:
            raise ValueError(
                f"torch.onnx.export: {_described(how)} needs opset {least} or newer, got {opset}; pass opset_version={least}, "
                "or use qtoolkit.export_onnx, which chooses the opset."
            )
        self.storage = storage_of(how.format, *how.code_range, min(opset, WITHOUT_INT4), constant=False)

    @abstractmethod
    def zeros(self, scale: V) -> V:
        """Return the zero points of a symmetric grid."""

    def write(self, x: V, dtype: DataType, scale: V, zero_point: V | None) -> V:
        if dtype == DataType.DOUBLE:
            raise ValueError("torch.onnx.export: QuantizeLinear does not support float64; export model.float().")
        wide = x if dtype == DataType.FLOAT else self.node_of("Cast", x, to=DataType.FLOAT)
        zero = self.zeros(scale) if zero_point is None else self.node_of("Cast", zero_point, to=self.storage.dtype)
        grid = (scale,) if self.code_range == SUMS else (scale, zero)
        y = self.values(self.codes(wide, grid, {}), grid, {})
        return y if dtype == DataType.FLOAT else self.node_of("Cast", y, to=dtype)


def _least_opset(how: Rounding) -> int:
    return smallest_opset(how.format, *how.code_range, how.block_size)


def _described(how: Rounding) -> str:
    codes = f"integers in {list(how.code_range)}" if how.format == "int" else f"format={how.format!r}"
    return f"a quantizer with {codes}{f' in blocks of {how.block_size}' if how.block_size else ''}"


class _Symbolic(_Plain[Tensor]):
    """Writes the nodes into the graph that torch.export records."""

    def node_of(self, op_type: str, *inputs: Tensor, role: str = "", **attributes: Attribute) -> Tensor:
        types = {"QuantizeLinear": self.storage.dtype, "DequantizeLinear": DataType.FLOAT}
        given = attributes.get("to", types.get(op_type))
        return torch.onnx.ops.symbolic(
            op_type,
            inputs,
            {key: int(value) if isinstance(value, DataType) else value for key, value in attributes.items()},
            dtype=int(given) if isinstance(given, DataType) else inputs[0].dtype,
            shape=inputs[0].shape,
        )

    def constant(self, array: Array, dtype: DataType, name: str) -> Tensor:
        return torch.full((), array.item(), dtype=to_torch_dtype(dtype))

    def zeros(self, scale: Tensor) -> Tensor:
        return torch.zeros(scale.shape, dtype=to_torch_dtype(self.storage.dtype))

    def reshaped(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x.reshape(*sizes)

    def swapped(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def written_by_dynamo(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    format: str,
    code_range: tuple[int, int],
    axis: int | None,
    *blocks: int,
) -> Tensor:
    """Record a call as ONNX nodes; return the outputs.

    The recorded nodes cannot depend on the opset of the file: torch.export does not know it.
    """
    how = Rounding(format, code_range, axis, *blocks)
    opset = _least_opset(how) if format in ("int", *FLOATS) else 0
    if opset > NATIVE["dynamo"][0]:
        warn(
            f"torch.onnx.export: {_described(how)} needs opset {opset} or newer: pass "
            f"opset_version={opset} or more, or use qtoolkit.export_onnx, which chooses it.",
        )
    pair = _Symbolic(opset, how, x.shape)
    return pair.write(x, from_torch_dtype(x.dtype), scale, zero_point)


class _Graph(_Plain[Value]):
    """Writes the nodes into a graph of the TorchScript exporter."""

    def __init__(self, g: "GraphContext", opset: int, how: Rounding, shape: Sequence[int]) -> None:
        super().__init__(opset, how, shape)
        self.g = g

    def node_of(self, op_type: str, *inputs: Value, role: str = "", **attributes: Attribute) -> Value:
        values = {f"{key}_i": int(v) if isinstance(v, DataType) else v for key, v in attributes.items()}
        return op_in_torchscript(self.g, op_type, *inputs, **values)

    def constant(self, array: Array, dtype: DataType, name: str) -> Value:
        return op_in_torchscript(self.g, "Constant", value_t=torch.tensor(array).to(to_torch_dtype(dtype)))

    def zeros(self, scale: Value) -> Value:
        sizes = present(type_in_torchscript(scale)[1], "the shape of a scale")
        zeros = torch.zeros(sizes, dtype=to_torch_dtype(self.storage.dtype))
        return op_in_torchscript(self.g, "Constant", value_t=zeros)


def op_in_torchscript(g: "GraphContext", op: str, *inputs: Value, **attributes: Any) -> Value:
    """Write a node into a graph of the TorchScript exporter. Attribute names end in their type, as in `axis_i`."""
    output: Value = g.op(op, *inputs, **attributes)
    return output


def written_by_torchscript(g: "GraphContext", opset: int, inputs: Sequence[Value], how: Rounding) -> Value:
    """Write a call as nodes of a TorchScript exporter's graph; return the output."""
    x, scale, *zero_point = inputs
    dtype, sizes = type_in_torchscript(x)
    return _Graph(g, opset, how, sizes or ()).write(x, dtype, scale, zero_point[0] if zero_point else None)


def type_in_torchscript(x: Value) -> tuple[DataType, list[int] | None]:
    """Return the type and sizes of a floating-point tensor of the TorchScript exporter; a dynamic size is None."""
    kind = x.type()
    sizes = kind.sizes() if isinstance(kind, torch.TensorType) else None
    return from_torch_dtype(present(kind.dtype(), "the type of a tensor")), sizes
