"""What rules of files read of a node beyond its op: how a file stores codes, and the bounds of a clip."""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The first opsets whose QuantizeLinear has an axis, and blocks; and a type of codes, by the beginning of its name.
AXIS_OPSET, BLOCKS_OPSET = 13, 21
OPSETS = {"FLOAT8": 19, "INT16": 21, "UINT16": 21, "INT4": 21, "UINT4": 21, "FLOAT4": 23, "INT2": 25, "UINT2": 25}


def first_opset(dtype: str, *, by_axis: bool, blocks: bool) -> int:
    """Return the first opset whose QuantizeLinear has a type of codes, by ONNX's name, an axis and blocks."""
    of_type = next((opset for name, opset in OPSETS.items() if dtype.startswith(name)), 10)
    return max(of_type, AXIS_OPSET * by_axis, BLOCKS_OPSET * blocks)


@dataclass(frozen=True, eq=False)
class Codes:
    """A QuantizeLinear, or a DequantizeLinear whose codes the file stores."""

    dtype: str  # ONNX's name of the type of the codes: "INT8", "UINT8", "FLOAT8E4M3FN"
    scale: Array | None  # the scale; None where it is computed
    zero_point: Array | None  # the zero point, 0 where the node has none; None where it is computed
    has_zero_point: bool  # whether the node has a zero point
    axis: int | None  # the axis that the scales run along; None for one scale
    block_size: int  # the number of elements along the axis that share a scale; 0 without blocks
    takers: int = 1  # how many nodes take the codes

    @property
    def bits(self) -> int:
        """The width of the codes."""
        found = re.search(r"\d+", self.dtype)
        return int(found.group()) if found else 0

    @property
    def is_asymmetric(self) -> bool:
        """Whether a zero point is known and is not 0."""
        return self.zero_point is not None and bool(np.any(np.asarray(self.zero_point, np.float32) != 0))

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest code of the type; (0, 0) of a type that is no integer."""
        if self.dtype not in ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4"):
            return 0, 0
        half = 1 << self.bits - 1
        return (0, 2 * half - 1) if self.dtype.startswith("U") else (-half, half - 1)

    @property
    def grid(self) -> Hashable:
        """What distinguishes this grid from others."""
        scale, zero = (
            None if a is None else np.asarray(a, np.float32).tobytes() for a in (self.scale, self.zero_point)
        )
        return (self.dtype, scale, zero, self.axis, self.block_size)


@dataclass(frozen=True)
class FileNode:
    """A node of a file."""

    op_type: str  # its op
    domain: str  # the domain of its op, "" for ONNX's own
    opset: int  # the opset of the file
    codes: Codes | None = None  # of a quantizer, its codes
    weight: Codes | None = None  # of a layer, the codes of its weight; None where it stays float
    bias: Codes | None = None  # of a layer, the codes of its bias; None where it stays float or has none
    # of a clip, its bounds, infinite where it has none; None of other nodes, and where they are computed
    bounds: tuple[float, float] | None = None
