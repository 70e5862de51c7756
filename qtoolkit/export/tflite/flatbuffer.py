"""Builder of a LiteRT file: tensors, ops and metadata, in the published schema. ai-edge-litert ships the schema's classes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import DTypeLike

from qtoolkit.runtimes.execution import Array

if TYPE_CHECKING:
    from ai_edge_litert import schema_py_generated

METADATA = "qtoolkit"
IDENTIFIER = b"TFL3"
# The version of the schema, and the oldest sufficient version of each op (tflite/tools/versioning/op_version.cc).
SCHEMA_VERSION = 3
TYPES = {np.dtype(kind.lower()): kind for kind in ("FLOAT32", "INT8", "INT16", "INT32", "INT64")}


class FileFacts(TypedDict):
    """The metadata of a file, used by the verification. Orders and axes are as in `TensorInFile.order`."""

    quantizers: Sequence[tuple[str, int, Sequence[int]]]  # of activations: name, tensor and order
    weights: Sequence[tuple[str, int, Sequence[int], Sequence[int]]]  # name, tensor, axes, and shape in the model
    constants: list[str]  # the quantizers of codes that do not depend on the inputs
    inputs: Sequence[Sequence[int]]  # the order of each
    outputs: Sequence[Sequence[int]]
    conversions: int
    layers: Sequence[tuple[str, str, bool]]  # name, kernel, and whether it computes on codes


@dataclass(frozen=True)
class Scales:
    """The grid of a tensor in a file."""

    scale: tuple[float, ...]  # one scale, or one for each channel
    zero_point: int = 0  # the code of zero
    axis: int = 0  # the axis of the channels in the file
    dtype: str = "int8"  # the type of the codes


@dataclass(frozen=True)
class TensorInFile:
    """A tensor of a file."""

    tensor: int  # its index
    shape: tuple[int, ...]  # the shape of the model's tensor
    # the model's dimension of each axis in the file: (0, 2, 3, 1) for an NHWC image
    order: tuple[int, ...]
    scales: Scales | None = None  # the grid of its codes; None for floats

    @property
    def is_plain(self) -> bool:
        """Whether the file has the model's order of dimensions."""
        return self.order == tuple(range(len(self.order)))

    def axis(self, dim: int) -> int:
        """Return the file's axis of a dimension of the model's tensor."""
        return self.order.index(dim % len(self.shape))

    def moved(self, shape: Sequence[int], order: Sequence[int]) -> "TensorInFile":
        """Return a value with the same grid, another shape and order, and no tensor index yet."""
        return replace(self, tensor=-1, shape=tuple(shape), order=tuple(order))


def in_order(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return sizes in the order of the file's axes."""
    return tuple(sizes[dim] for dim in order)


class FileBuilder:
    """Collects the parts of a file with one subgraph."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated

        self.schema = schema_py_generated
        self.tensors: list[schema_py_generated.TensorT] = []
        self.operators: list[schema_py_generated.OperatorT] = []
        self.codes: dict[str, int] = {}
        self.buffers = [self.schema.BufferT()]
        self.shared: dict[bytes, int] = {}
        self.names: dict[str, int] = {}

    def tensor(
        self, name: str, shape: Sequence[int], dtype: DTypeLike, scales: Scales | None = None, data: Array | None = None
    ) -> int:
        """Add a tensor, constant if it has data; return its index. A number is appended to duplicate names."""
        count = self.names[name] = self.names.get(name, 0) + 1
        tensor = self.schema.TensorT(
            name=(name if count == 1 else f"{name}:{count}").encode(),
            shape=np.array(shape, np.int32),
            hasRank=True,
            type=self.option("TensorType", TYPES[np.dtype(dtype)]),
            quantization=None if scales is None else self._quantization(scales),
            buffer=0 if data is None else self._buffer(np.ascontiguousarray(data, dtype).tobytes()),
        )
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def operator(self, op: str, inputs: Sequence[int], outputs: Sequence[int], **values: object) -> None:
        """Add an op: its name, its tensors, and its options by the schema's names."""
        number = self.codes.setdefault(op, len(self.codes))
        operator = self.schema.OperatorT(number, np.array(inputs, np.int32), np.array(outputs, np.int32))
        if options := OPTIONS.get(op):
            operator.builtinOptionsType = self.option("BuiltinOptions", options)
            operator.builtinOptions = getattr(self.schema, f"{options}T")(**values)
        self.operators.append(operator)

    def option(self, kind: str, name: str) -> int:
        """Return the number of an option, such as "VALID" of "Padding"."""
        return int(getattr(getattr(self.schema, kind), name))

    def pack(
        self,
        inputs: Mapping[str, TensorInFile],
        outputs: Mapping[str, TensorInFile],
        description: str,
        facts: FileFacts,
    ) -> bytes:
        """Return the file with these inputs and outputs, and with facts as its metadata, in JSON."""
        import flatbuffers

        schema = self.schema
        places = (np.array([x.tensor for x in ends.values()], np.int32) for ends in (inputs, outputs))
        ends = ([schema.TensorMapT(n.encode(), x.tensor) for n, x in each.items()] for each in (inputs, outputs))
        model = schema.ModelT(
            version=SCHEMA_VERSION,
            description=description.encode(),
            subgraphs=[schema.SubGraphT(self.tensors, *places, self.operators, b"main")],
            operatorCodes=[self._operator_code(op) for op in self.codes],
            signatureDefs=[schema.SignatureDefT(*ends, b"serving_default")],
            metadata=[schema.MetadataT(METADATA.encode(), self._buffer(json.dumps(facts).encode()))],
            buffers=self.buffers,
        )
        builder = flatbuffers.Builder(sum(0 if b.data is None else len(b.data) for b in self.buffers) + 1024)
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def _quantization(self, scales: Scales) -> "schema_py_generated.QuantizationParametersT":
        return self.schema.QuantizationParametersT(
            scale=np.array(scales.scale, np.float32),
            zeroPoint=np.full(len(scales.scale), scales.zero_point, np.int64),
            quantizedDimension=scales.axis,
        )

    def _buffer(self, data: bytes) -> int:
        if data not in self.shared:
            self.buffers.append(self.schema.BufferT(np.frombuffer(data, np.uint8)))
            self.shared[data] = len(self.buffers) - 1
        return self.shared[data]

    def _operator_code(self, op: str) -> "schema_py_generated.OperatorCodeT":
        code = self.option("BuiltinOperator", op)
        in_a_byte = min(code, self.schema.BuiltinOperator.PLACEHOLDER_FOR_GREATER_OP_CODES)
        return self.schema.OperatorCodeT(in_a_byte, version=VERSIONS.get(op, 1), builtinCode=code)


# The options tables of ops by the schema's names: most have the name of the op.
OPTIONS: Mapping[str, str] = {
    **{
        op: f"{op.title().replace('_', '')}Options"
        for op in (
            *("ADD", "SUB", "MUL", "DIV", "POW", "EXP", "GELU", "LEAKY_RELU", "SOFTMAX", "CONV_2D", "DEPTHWISE_CONV_2D"),
            *("TRANSPOSE_CONV", "FULLY_CONNECTED", "CONCATENATION", "RESHAPE", "TRANSPOSE", "SLICE", "STRIDED_SLICE", "PAD"),
            *("RESIZE_NEAREST_NEIGHBOR", "RESIZE_BILINEAR"),
        )
    },
    **dict.fromkeys(("MAX_POOL_2D", "AVERAGE_POOL_2D"), "Pool2DOptions"),
    **dict.fromkeys(("MAXIMUM", "MINIMUM"), "MaximumMinimumOptions"),
    **dict.fromkeys(("MEAN", "REDUCE_MAX", "REDUCE_MIN"), "ReducerOptions"),
    "BATCH_MATMUL": "BatchMatMulOptions", "PADV2": "PadV2Options",
}  # fmt: skip
# The versions of ops on int8, if not the first.
VERSIONS: Mapping[str, int] = {
    "ABS": 2, "ADD": 2, "AVERAGE_POOL_2D": 2, "BATCH_MATMUL": 2, "CONCATENATION": 2, "CONV_2D": 3, "DEPTHWISE_CONV_2D": 3,
    "DEQUANTIZE": 2, "FULLY_CONNECTED": 5, "GELU": 1, "LEAKY_RELU": 2, "LOGISTIC": 2, "MAX_POOL_2D": 2, "MEAN": 2, "MUL": 2,
    "PAD": 2, "PADV2": 2, "REDUCE_MAX": 2, "REDUCE_MIN": 2, "RELU": 2, "RELU6": 2, "RESIZE_BILINEAR": 3,
    "RESIZE_NEAREST_NEIGHBOR": 3,
    "SLICE": 2, "SOFTMAX": 2, "STRIDED_SLICE": 2, "SUB": 2, "TANH": 2, "TRANSPOSE": 2, "TRANSPOSE_CONV": 3,
}  # fmt: skip
