"""Sums of attention scores with a mask or a bias. They stay float: a mask's large negative values would fill the range."""

from collections.abc import Callable, Iterator

from qtoolkit.backends import Backend
from qtoolkit.lint.findings import MODEL_OPTIMIZER, Broken, LintRule
from qtoolkit.lint.ops import Op
from qtoolkit.op_kinds.reached import reached
from qtoolkit.verdicts import Cause, Verdict

MASKED = Verdict.left_float(
    Cause.TARGET,
    "attention scores with a mask or a bias: the mask's large negative values would take up the integer range",
)


def are_masked_scores(op: Op, is_float: Callable[[Op], bool]) -> bool:
    """Return whether an op adds to a product of two activations, and only a softmax in float takes the sum."""
    return op.kind.sums and _only_softmax_takes(op, is_float) and any(map(_is_score, op.inputs))


def _is_score(op: Op) -> bool:
    def before(op: Op) -> list[Op]:
        return [] if not _keeps_scores(op) else op.inputs if op.kind.sums else op.inputs[:1]

    makers = (op for op in reached([op], before) if not _keeps_scores(op))
    return any(op.kind.of_two_matrices and op.layer is None for op in makers)


def _only_softmax_takes(op: Op, is_float: Callable[[Op], bool]) -> bool:
    while len(users := _users_of_values(op)) == 1 and not op.returned:
        op = users[0]
        if op.kind.normalizes_scores:
            return is_float(op)
        if not _keeps_scores(op):
            return False
    return False


def _users_of_values(op: Op) -> list[Op]:
    # x.type_as(op) reads the dtype of op, not its values.
    return [user for user in op.users if not user.is_cast or user.inputs[:1] == [op]]


def _keeps_scores(op: Op) -> bool:
    # Models compute the softmax in float32.
    return op.is_cast or op.is_quantizer or op.kind.moves or op.kind.sums or op.kind.with_constant


def _quantized(op: Op, backend: Backend) -> Iterator[Broken]:
    if any(source.quantizer is not None for source in op.inputs) and are_masked_scores(
        op, lambda softmax: backend.role(softmax.kind) == "float"
    ):
        yield (
            "the sum of attention's scores and a mask is quantized; a mask's large negative values would fill its range.",
            "Leave both inputs of this add in float.",
        )


MASKED_SCORES = LintRule("masked-scores", _quantized, MODEL_OPTIMIZER)
