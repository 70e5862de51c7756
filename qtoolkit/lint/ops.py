"""The ops that rules read, of a model's graph and of a file in one form, and how a file stores quantized values."""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtoolkit.backends import Backend
from qtoolkit.op_kinds.kind import OpKind, belongs_to_layer
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.table import NO_OPS
from qtoolkit.runtimes.execution import Array

# The first opsets whose QuantizeLinear has an axis, and blocks; and an integer type, by the beginning of its name.
AXIS_OPSET, BLOCKS_OPSET = 13, 21
OPSETS = {"FLOAT8": 19, "INT16": 21, "UINT16": 21, "INT4": 21, "UINT4": 21, "FLOAT4": 23, "INT2": 25, "UINT2": 25}


def first_opset(dtype: str, *, by_axis: bool, blocks: bool) -> int:
    """Return the first opset whose QuantizeLinear has an integer type, by ONNX's name, an axis and blocks."""
    of_type = next((opset for name, opset in OPSETS.items() if dtype.startswith(name)), 10)
    return max(of_type, AXIS_OPSET * by_axis, BLOCKS_OPSET * blocks)


@dataclass(frozen=True, eq=False)
class FileCodes:
    """A QuantizeLinear, or a DequantizeLinear whose input the file stores."""

    dtype: str  # ONNX's name of the type of the codes: "INT8", "UINT8", "FLOAT8E4M3FN"
    scale: Array | None  # the scale; None where it is computed
    zero_point: Array | None  # the zero point, 0 where the node has none; None where it is computed
    has_zero_point: bool  # whether the node has a zero point
    axis: int | None  # the axis that the scales run along; None for one scale
    block_size: int  # the number of elements along the axis that share a scale; 0 without blocks
    takers: int = 1  # how many nodes take the integers

    @property
    def bits(self) -> int:
        """The bits of a quantized value."""
        found = re.search(r"\d+", self.dtype)
        return int(found.group()) if found else 0

    @property
    def is_asymmetric(self) -> bool:
        """Whether a zero point is known and is not 0."""
        return self.zero_point is not None and bool(np.any(np.asarray(self.zero_point, np.float32) != 0))

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest value of the type; (0, 0) of a type that is no integer."""
        if self.dtype not in ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4"):
            return 0, 0
        half = 1 << self.bits - 1
        return (0, 2 * half - 1) if self.dtype.startswith("U") else (-half, half - 1)

    @property
    def grid(self) -> Hashable:
        """The values that distinguish this grid from others."""
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
    codes: FileCodes | None = None  # of a quantizer: how it is stored
    weight: FileCodes | None = None  # of a layer: how its weight is stored; None where it stays float
    bias: FileCodes | None = None  # of a layer: how its bias is stored; None where it stays float or has none
    # of a clip, its bounds, infinite where it has none; None for other nodes, and where they are computed
    bounds: tuple[float, float] | None = None
    # of an average pool, whether its windows may reach beyond the padded input (`ceil_mode`), and whether padding counts
    reaches_beyond: bool = False
    counts_padding: bool = False
    faster_by_tanh: bool = False  # of a SiLU, whether TensorRT takes it faster in the form with a tanh
    dtype: str = ""  # ONNX's name of the type of its first output; "" where it is not known
    # how many values its outputs have, and how many it takes of each of the op's inputs; None where it is not known
    values: int | None = None
    taken: tuple[int | None, ...] = ()
    macs: int = 0  # its multiplications, as far as the sizes of its tensors are known
    weights: int = 0  # how many values its weight has


@dataclass(frozen=True)
class WeightFacts:
    """How a weight is quantized."""

    bits: int  # the bits of its integers
    axis: int | None  # the axis that its scales run along; None for one scale
    blocks: bool = False  # whether groups along the axis have scales of their own
    block_size: int = 0  # the number of elements in a group, in a file


@dataclass(frozen=True)
class LayerFacts:
    """A layer with a weight of its own."""

    weight: WeightFacts | None  # how the weight is quantized; None where it stays float
    # the input channels; of a convolution with groups, all of them. 0 where they are not known, as the sizes below
    inputs: int = 0
    outputs: int = 0
    groups: int = 1
    kernel: tuple[int, ...] = ()  # the spatial sizes of its kernel; () for a linear layer
    output_axis: int = 0  # the axis of the weight that holds the output channels


@dataclass(eq=False)
class Op:
    """One op."""

    name: str  # its name in findings
    kind: OpKind  # its kind
    # the ops that compute the tensors that it takes as data, each once
    inputs: list["Op"] = field(default_factory=list)
    users: list["Op"] = field(default_factory=list)  # the ops that take its output
    grid: Hashable = None  # of a quantizer, what distinguishes its grid from others; None for other ops
    of_weight: bool = False  # whether it is the quantizer of a weight that a function takes
    is_cast: bool = False  # whether it converts its first input to another type; others tell the type alone
    place: int = 0  # its place in the order in which the ops run
    # of a layer with a weight of its own, or of a function that takes a weight, what is known about it
    layer: LayerFacts | None = None
    returned: bool = False  # whether the graph returns its output
    node: Any = None  # its node: in a file, the FileNode that `qtoolkit.export.files.ops` makes of it
    # the quantizer that its output comes from, through ops that only move values: itself, for a quantizer; of a concat whose
    # inputs have one grid, the first input's; None for a float tensor. `find_quantizers` sets it
    quantizer: "Op | None" = None

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the graph."""
        return self.kind is NO_OPS["placeholder"]

    @property
    def is_quantizer(self) -> bool:
        """Whether it is a quantizer."""
        return self.grid is not None

    @property
    def weight(self) -> WeightFacts | None:
        """How its weight is quantized; None where the weight stays float, and of an op that takes none."""
        return None if self.layer is None else self.layer.weight

    @property
    def has_float_weight(self) -> bool:
        """Whether it is a layer whose weight stays float."""
        return self.kind.multiplies and self.layer is not None and self.weight is None


def codes_of(op: Op | None) -> FileCodes | None:
    """Return how a quantizer of a file stores values; None for other ops."""
    return None if op is None else op.node.codes


def origin(op: Op, through: Callable[[OpKind], bool] = belongs_to_layer, sole_user: bool = False) -> Op | None:
    """Return the op that computes a tensor, back through quantizers and ops of some kinds.

    With `sole_user` None where a tensor on the way has other users.
    """
    while not sole_user or (len(op.users) == 1 and not op.returned):
        if not (op.is_quantizer or through(op.kind)) or not op.inputs:
            return op
        op = op.inputs[0]
    return None


def find_quantizers(ops: Iterable[Op], backend: Backend) -> None:
    """Set `quantizer` of all ops of a graph, given in order: through ops that only move values on a target."""
    for op in ops:
        role = "" if op.is_quantizer else backend.role(op.kind)
        if op.is_quantizer:
            op.quantizer = op
        elif role == "transparent" and op.inputs:
            op.quantizer = op.inputs[0].quantizer
        elif role == "concat":
            found = [source.quantizer for source in op.inputs]
            one_grid = len({None if quantizer is None else quantizer.grid for quantizer in found}) == 1
            op.quantizer = found[0] if one_grid else None
        else:
            op.quantizer = None


def takes_into_unit(first: OpKind, follower: OpKind, backend: Backend) -> bool:
    """Return whether the target computes a batch norm, or an activation, as one with the op that begins a unit."""
    return first.layer if follower.normalizes_batches else follower.activation and backend.joins(first, follower)


def end_of_unit(op: Op, backend: Backend) -> Op:
    """Return the last op of the unit that an op begins: the op itself where nothing joins it."""
    last = op
    while len(last.users) == 1 and not last.returned and not last.kind.activation:
        if not takes_into_unit(op.kind, last.users[0].kind, backend):
            break
        last = last.users[0]
    return last


def users_behind(op: Op, backend: Backend) -> list[Op]:
    """Return the ops that take a tensor's values, moved or not: quantizers too."""

    def moves(user: Op) -> bool:
        return not user.is_quantizer and backend.role(user.kind) in ("transparent", "concat")

    users = reached(op.users, lambda user: user.users if moves(user) else ())
    return [user for user in users if not moves(user)]


def is_taken_by_codes(op: Op, backend: Backend) -> bool:
    """Return whether a quantized op takes an op's output, moved or not."""
    users = users_behind(op, backend)
    return any(user.is_quantizer or (backend.quantizes(user.kind) and not user.has_float_weight) for user in users)


def serves_others(source: Op, op: Op, backend: Backend) -> bool:
    """Return whether a tensor that an op takes is quantized for other ops, or for the op that computes it, or not at all."""
    quantizer = source.quantizer
    if quantizer is None:
        return True
    maker = origin(quantizer)
    computes = maker is not None and maker.kind.name in backend.needs_quantized_output
    needed = computes or (maker is not None and not maker.kind.multiplies and backend.quantizes(maker.kind))
    users = (user for user in users_behind(quantizer, backend) if user is not op and not user.has_float_weight)
    return needed or any(backend.quantizes(user.kind) for user in users)
