"""The ops that placement rules read: those of a model's graph and those of a file, in one form."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from qtoolkit.backends import Backend
from qtoolkit.lint.file_facts import Codes, FileNode
from qtoolkit.op_kinds.kind import OpKind, belongs_to_layer
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.table import NO_OPS


@dataclass(frozen=True)
class WeightGrid:
    """How a weight is quantized."""

    bits: int  # the width of its codes
    axis: int | None  # the axis that its scales run along; None for one scale
    blocks: bool = False  # whether groups along the axis have scales of their own
    block_size: int = 0  # the number of elements in a group, in a file


@dataclass(frozen=True)
class Layer:
    """A layer with a weight of its own."""

    weight: WeightGrid | None  # how the weight is quantized; None where it stays float
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
    layer: Layer | None = None
    returned: bool = False  # whether the graph returns its output
    node: Any = None  # its node: in a file, as `qtoolkit.export.files.ops` describes it
    # the quantizer that its output comes from, through ops that only move values: itself, for a quantizer; of a concat whose
    # inputs have one grid, the first input's; None of a float tensor. `find_quantizers` sets it
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
    def weight(self) -> WeightGrid | None:
        """How its weight is quantized; None where the weight stays float, and of an op that takes none."""
        return None if self.layer is None else self.layer.weight

    @property
    def has_float_weight(self) -> bool:
        """Whether it is a layer whose weight stays float."""
        return self.kind.multiplies and self.layer is not None and self.weight is None


def codes_of(op: Op | None) -> Codes | None:
    """Return the codes of a quantizer of a file; None of no quantizer, and of one of a model's graph."""
    return op.node.codes if op is not None and isinstance(op.node, FileNode) else None


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
