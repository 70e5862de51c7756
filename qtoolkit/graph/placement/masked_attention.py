"""Sums of attention scores with a mask or a bias. They stay float: a mask's large negative values would take all codes."""

from torch import fx

from qtoolkit.graph.placement.roles import Roles
from qtoolkit.graph.plan import Cause, Verdict
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.nodes import kind_of, tensor_inputs
from qtoolkit.op_kinds.rules import CASTS

MASKED = Verdict.left_float(
    Cause.TARGET, "attention's scores with a mask or a bias; a mask's large negative values would leave them few codes"
)


def are_masked_scores(node: fx.Node, roles: Roles) -> bool:
    """Return whether a node adds to a product of two activations, and only a softmax in float takes the sum."""
    return (
        kind_of(node).sums
        and _only_softmax_takes(node, roles)
        and any(_is_score(source, roles) for source in tensor_inputs(node))
    )


def _is_score(node: fx.Node, roles: Roles) -> bool:
    waiting, seen = [node], set[fx.Node]()
    while waiting:  # graphs are deeper than Python's stack
        node = waiting.pop()
        if _keeps_scores(node):
            inputs = tensor_inputs(node) or node.all_input_nodes
            waiting += [] if node in seen else inputs if kind_of(node).sums else inputs[:1]
            seen.add(node)
        elif kind_of(node).of_two_matrices and not roles.weights_of(node):
            return True
    return False


def _only_softmax_takes(node: fx.Node, roles: Roles) -> bool:
    while len(users := _users_of_values(node)) == 1:
        node = users[0]
        if kind_of(node).normalizes_scores:
            return roles[node] == "float"
        if not _keeps_scores(node):
            return False
    return False


def _users_of_values(node: fx.Node) -> list[fx.Node]:
    # x.type_as(node) reads the dtype of node, not its values.
    return [user for user in node.users if not _is_cast(user) or user.args[0] is node]


def _keeps_scores(node: fx.Node) -> bool:
    return keeps_scores(kind_of(node)) or _is_cast(node)


def keeps_scores(kind: OpKind) -> bool:
    """Return whether an op of a kind may stand between attention's scores and their softmax."""
    return kind.moves or kind.sums or kind.with_constant


def _is_cast(node: fx.Node) -> bool:
    # Models compute the softmax in float32.
    return node.op == "call_method" and node.target in CASTS
