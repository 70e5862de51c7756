"""The nodes of a quantizing op in a file: QuantizeLinear and DequantizeLinear, and the nodes around them.

Integers narrower than their storage type are clipped between the two nodes, so that the file saturates like training. The
scales of a grouped transposed convolution vary along two dimensions of its weight, which the axis attribute cannot express. The
weight is reshaped to (groups * out, in * k...) before the two nodes, and back after them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from onnx_ir import DataType

from qtoolkit.export.files.quantizer_nodes import DEQUANTIZE, QUANTIZE
from qtoolkit.export.pairs.storage import SUMS, Rounding, Storage
from qtoolkit.lint.ops import BLOCKS_OPSET
from qtoolkit.runtimes.execution import Array

V = TypeVar("V")
Attribute = int | DataType | Sequence[int]  # of a node


class PairForm(ABC, Generic[V]):
    """Writes the nodes of one call; a subclass writes single nodes with inputs and outputs of type V.

    `shape` is the input's.
    """

    storage: Storage  # how codes are stored; the subclass sets it

    def __init__(self, how: Rounding, shape: Sequence[int]) -> None:
        self.format, self.code_range, self.shape = how.format, how.code_range, shape
        self.group, self.block_size = how.group, how.block_size
        self.axis = 0 if how.group > 1 else how.axis  # of the rows

    @abstractmethod
    def node_of(self, op_type: str, *inputs: V, role: str = "", **attributes: Attribute) -> V:
        """Write a node; return its output."""

    @abstractmethod
    def constant(self, array: Array, dtype: DataType, name: str) -> V:
        """Return a small constant; a new one gets this name."""

    def reshaped(self, x: V, sizes: Sequence[int]) -> V:
        """Return x in another shape."""
        return self.node_of("Reshape", x, self.constant(np.array(sizes), DataType.INT64, "sizes"))

    def swapped(self, x: V) -> V:
        """Return a four-dimensional x with the middle dimensions swapped."""
        return self.node_of("Transpose", x, perm=[0, 2, 1, 3])

    def codes(self, x: V, grid: Sequence[V], attributes: Mapping[str, Attribute]) -> V:
        """Write the nodes that quantize: QuantizeLinear, or other ops for int32, which it does not support."""
        x = self._to_rows(x)
        if self.code_range == SUMS:
            codes = self.node_of("Round", self.node_of("Div", x, grid[0]))
            bounds = [self.constant(np.array(bound), DataType.FLOAT, "code_float") for bound in SUMS]
            return self.node_of("Cast", self.node_of("Clip", codes, *bounds), to=DataType.INT32)
        codes = self.node_of("QuantizeLinear", x, *grid, role=QUANTIZE, **self._channels(), **attributes)
        return self._clip(codes) if self.storage.clips else codes

    def values(self, codes: V, grid: Sequence[V], attributes: Mapping[str, Attribute]) -> V:
        """Write the nodes that dequantize."""
        y = self.node_of("DequantizeLinear", codes, *grid, role=DEQUANTIZE, **self._channels(), **attributes)
        return self._from_rows(y)

    def check_blocks(self, opset: int, sizes: Sequence[int]) -> None:
        """Raise ValueError unless the opset supports blocks and the scale has the shape of the blocks."""
        if self.block_size == 0 or self.axis is None:  # blocks have an axis
            return
        if opset < BLOCKS_OPSET:
            raise ValueError(
                f"export_onnx: block_size={self.block_size} (a group_size) needs opset {BLOCKS_OPSET} or newer, got "
                f"{opset}; pass opset={BLOCKS_OPSET}."
            )
        blocks = list(self.shape)
        blocks[self.axis] //= self.block_size
        if list(sizes) != blocks:
            raise ValueError(
                f"export_onnx: with block_size={self.block_size}, the scale of fake_quant must have the shape of the blocks, "
                f"{blocks}, got {list(sizes)}; reshape the scale."
            )

    def _channels(self) -> dict[str, int]:
        axis = {} if self.axis is None else {"axis": self.axis}
        return axis | ({"block_size": self.block_size} if self.block_size > 0 else {})

    def _clip(self, codes: V) -> V:
        # onnxruntime's Clip does not support 16-bit integers.
        wide = self.storage.dtype.itemsize > 1
        dtype = DataType.INT32 if wide else self.storage.dtype
        bounds = [self.constant(np.array(bound), dtype, f"code_{dtype.name.lower()}") for bound in self.code_range]
        clipped = self.node_of("Clip", self.node_of("Cast", codes, to=dtype) if wide else codes, *bounds)
        return self.node_of("Cast", clipped, to=self.storage.dtype) if wide else clipped

    def _to_rows(self, x: V) -> V:
        rows = [self.group * self.shape[1], -1] if self.group > 1 else []
        return x if self.group == 1 else self._through_rows(x, [self.group, *self._sides(), -1], rows)

    def _from_rows(self, y: V) -> V:
        if self.group == 1:
            return y
        return self._through_rows(y, [self.group, *reversed(self._sides()), -1], self.shape)

    def _sides(self) -> list[int]:
        """Return the input and output channels of a group of the weight."""
        return [self.shape[0] // self.group, self.shape[1]]

    def _through_rows(self, x: V, apart: Sequence[int], together: Sequence[int]) -> V:
        return self.reshaped(self.swapped(self.reshaped(x, apart)), together)
