"""Units: an op with the batch norm and the activation behind it, which the target computes as one."""

from qtoolkit.backends import Backend
from qtoolkit.lint.ops import Op
from qtoolkit.op_kinds.kind import OpKind


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
