"""How a file stores quantized weights, and which arguments of `export_onnx` make it smaller."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qtoolkit.export.files.quantizer_nodes import quantizer_of
from qtoolkit.lint.ops import BLOCKS_OPSET
from qtoolkit.quantizers.frozen import Grid

if TYPE_CHECKING:
    import onnx_ir


# Measured with onnxruntime 1.30 on an AMD Zen 5 processor, one thread: docs/runtimes.md, "Latency".
FASTER = (
    "0.4 to 0.9 of the time on processors with VNNI, wrong sums on x86 without it; 7-bit weights are as fast, and exact"
)


@dataclass(frozen=True)
class StoredWeights:
    """A group of weights that a file stores in the same way.

    Attributes:
        count: The number of weights.
        bits: Bit width of their quantizers.
        dtype: The ONNX type in which the file stores them: an integer type, or "FLOAT", "FLOAT16" or "BFLOAT16" for float
            weights that a QuantizeLinear node quantizes at run time.
        bytes: Size in the file.
        smaller_by: The arguments of `export_onnx` that give a smaller file; "" if there are none.
        smaller_bytes: Size with these arguments.
        faster_by: The argument that is faster on processors with VNNI instructions, and gives wrong sums on others; "" if there
            is none.
    """

    count: int
    bits: int
    dtype: str
    bytes: int
    smaller_by: str
    smaller_bytes: int
    faster_by: str = ""

    @property
    def is_packed(self) -> bool:
        """Whether several values share a byte."""
        return self.dtype in ("INT4", "UINT4", "INT2", "UINT2")

    def __str__(self) -> str:
        held = "as floats that the file quantizes, " if self.dtype in ("FLOAT", "FLOAT16", "BFLOAT16") else ""
        line = f"{self.count} weights of {self.bits} bits are stored {held}in {self.dtype}: {_size(self.bytes)}"
        line = f"{line}; {self.smaller_by}: {_size(self.smaller_bytes)}" if self.smaller_by else line
        return f"{line}\n  {self.faster_by}: {FASTER}" if self.faster_by else line


def stored_weights(file: "onnx_ir.Model", grids: Mapping[str, Grid], opset: int) -> tuple[StoredWeights, ...]:
    """Return how a file stores the quantized weights: one entry for each way."""
    found: dict[tuple[int, str, str, str], StoredWeights] = {}
    seen = set()
    for node in file.graph:
        grid = grids.get(quantizer_of(node))
        constant = _constant_behind(node.inputs[0]) if grid is not None and node.op_type == "DequantizeLinear" else None
        if grid is None or constant is None or constant.name in seen:
            continue
        seen.add(constant.name)
        one = _of(constant, grid, opset)
        key = one.bits, one.dtype, one.smaller_by, one.faster_by
        before = found.get(key, replace(one, count=0, bytes=0, smaller_bytes=0))
        size, smaller = before.bytes + one.bytes, before.smaller_bytes + one.smaller_bytes
        found[key] = replace(before, count=before.count + 1, bytes=size, smaller_bytes=smaller)
    return tuple(found.values())


def _of(constant: "onnx_ir.Value", grid: Grid, opset: int) -> StoredWeights:
    import onnx_ir

    from qtoolkit.export.pairs.storage import storage_of

    spec, dtype = grid.spec, constant.dtype or onnx_ir.DataType.FLOAT
    elements = math.prod(size for size in constant.shape or () if isinstance(size, int))
    now, newer = (
        storage_of(spec.element, spec.qmin, spec.qmax, version, constant=True).dtype
        for version in (opset, max(opset, BLOCKS_OPSET))
    )
    arguments = ["integer_weights=True"] if dtype.is_floating_point() and dtype.itemsize > now.itemsize else []
    arguments += [f"opset={BLOCKS_OPSET}"] if newer.itemsize < now.itemsize else []
    stored, smaller = (math.ceil(elements * kind.itemsize) for kind in (dtype, newer))
    faster = 'weight_codes="int8"' if grid.shifts and dtype == onnx_ir.DataType.UINT8 else ""
    return StoredWeights(1, spec.bits, dtype.name, stored, ", ".join(arguments), smaller, faster)


def _constant_behind(value: "onnx_ir.Value | None") -> "onnx_ir.Value | None":
    """Return the stored tensor from which nodes compute a value; None if it depends on inputs of the file.

    A Where reads its condition first, which can be stored, such as a mask: it is no weight.
    """
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.inputs and node.op_type != "Where" else None
    return value if value is not None and value.is_initializer() else None


def _size(bytes: int) -> str:
    return f"{bytes / 1024:.1f} KiB"
