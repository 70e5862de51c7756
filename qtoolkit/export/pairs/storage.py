"""Storage types of quantized values, the opsets that have them, and quantization of constants."""

from dataclasses import dataclass

import numpy as np
import torch
from onnx_ir import DataType
from onnx_ir.tensor_adapters import from_torch_dtype

from qtoolkit import ops
from qtoolkit.config.formats import LARGEST
from qtoolkit.lint.ops import BLOCKS_OPSET, first_opset
from qtoolkit.quantizers.bias import LARGEST_CODE
from qtoolkit.quantizers.frozen import code_dtype
from qtoolkit.runtimes.execution import Array

# The types of small floats.
FLOATS = {"e4m3": DataType.FLOAT8E4M3FN, "e5m2": DataType.FLOAT8E5M2, "e2m1": DataType.FLOAT4E2M1}
# The lowest and highest values of the 4-bit types, which QuantizeLinear has from BLOCKS_OPSET on.
INT4S = {DataType.INT4: (-8, 7), DataType.UINT4: (0, 15)}
# The type of biases, which lie on the accumulator's grid: int32, for which only DequantizeLinear exists.
SUMS = (-LARGEST_CODE, LARGEST_CODE)
POWERS_OPSET = 24  # the first whose scales may be powers of two in 8 bits, as in OCP MX


@dataclass(frozen=True)
class Rounding:
    """The rounding parameters of a quantizing op: its arguments that are not tensors."""

    format: str  # "int", or the float format
    code_range: tuple[int, int]  # lowest and highest integer code
    axis: int | None  # of the channels; None for one scale
    group: int = 1  # the parts of dimension 0 that have scales of their own
    block_size: int = 0  # the elements along the axis that share a scale; 0 without blocks


@dataclass(frozen=True)
class Storage:
    """How a file stores quantized values."""

    dtype: DataType  # type of the codes
    format: str  # "int", or the float format
    code_range: tuple[int, int]  # lowest and highest integer code
    clips: bool  # whether the type has codes beyond these


def smallest_opset(format: str, qmin: int, qmax: int, block_size: int = 0) -> int:
    """Return the first ONNX opset in which QuantizeLinear has a type for these integers, and blocks if block_size > 0.

    Example:
        >>> smallest_opset("int", -8, 7), smallest_opset("int", 0, 65535), smallest_opset("int", -8, 7, block_size=32)
        (13, 21, 21)
        >>> smallest_opset("e4m3", -448, 448), smallest_opset("e2m1", -6, 6)
        (19, 23)
    """
    dtype = from_torch_dtype(_integers(qmin, qmax)) if format == "int" else FLOATS[format]
    return first_opset(dtype.name, by_axis=True, blocks=block_size > 0)


def _integers(qmin: int, qmax: int) -> torch.dtype:
    return torch.int32 if (qmin, qmax) == SUMS else code_dtype(qmin, qmax)


def storage_of(format: str, qmin: int, qmax: int, opset: int, *, constant: bool, computed: bool = False) -> Storage:
    """Return how to store quantized values in an opset: in 4 bits if they fit.

    Constants are already in their range. Other values need a Clip if their type is wider than the grid. ONNX does not clip
    4-bit integers, so values that need a Clip are stored in 8 bits. `computed` values always use 8 bits: onnxruntime 1.30 gives
    4-bit values to its 8-bit kernels, and then does not load the file.
    """
    if format != "int":
        return Storage(FLOATS[format], format, (qmin, qmax), False)
    for dtype, (low, high) in INT4S.items():
        fits = (low, high) == (qmin, qmax) or (constant and low <= qmin and qmax <= high and (low < 0) == (qmin < 0))
        if opset >= BLOCKS_OPSET and fits and not computed:
            return Storage(dtype, format, (qmin, qmax), False)
    integers = _integers(qmin, qmax)
    info = torch.iinfo(integers)
    return Storage(from_torch_dtype(integers), format, (qmin, qmax), (info.min, info.max) != (qmin, qmax))


def code_array(
    x: Array, scale: Array, zero_point: Array | None, storage: Storage, axis: int | None, block_size: int
) -> Array:
    """Return a quantized constant in the type of the file; the scale has the layout of QuantizeLinear."""
    kind = storage.dtype.numpy()
    if storage.format == "int":
        zero = None if zero_point is None else _float32(zero_point)
        grid = (*storage.code_range, axis, 1, block_size, _integers(*storage.code_range))
        integers = ops.quantize(_float32(x), _float32(scale), zero, *grid)
        return np.asarray(integers.numpy().astype(kind))
    largest = LARGEST[storage.format]
    steps: Array = scale.astype(np.float32)
    if block_size > 0:
        steps = np.repeat(steps, block_size, axis)
    elif axis is not None:
        steps = steps.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])
    codes = np.clip(x.astype(np.float32) / steps, -largest, largest)
    return codes.astype(kind)


def _float32(array: Array) -> torch.Tensor:
    return torch.tensor(array.astype(np.float32))


def exact_in(array: Array, dtype: DataType) -> bool:
    """Return whether a type represents all numbers of a float32 array exactly."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype.numpy())
    return bool((rounded.astype(np.float32) == array).all())
