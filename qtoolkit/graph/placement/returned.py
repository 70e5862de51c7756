"""Layers that only the outputs of a graph take, which keep their precision."""

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.graph.nodes import is_output, kind_of, users_of
from qtoolkit.verdicts import Cause, Verdict

UNIT = ("batch_norm", "activation")


def is_returned(node: fx.Node, backend: Backend) -> bool:
    """Return whether only outputs of the graph take an op's result, and they stay float on the target.

    The batch norm and the activation of its unit may lie between, and ops that only move values.
    """
    waiting: list[tuple[fx.Node, tuple[str, ...]]] = [(node, UNIT)]  # with the parts that may still join the unit
    while waiting:
        source, joining = waiting.pop()
        for user in users_of(source):
            kind = kind_of(user)
            part = _part_of_unit(node, user, backend) if len(users_of(source)) == 1 else None
            if part in joining:
                waiting.append((user, joining[joining.index(part) + 1 :]))
            elif backend.role(kind) == "transparent":
                waiting.append((user, joining if kind.returns_input else ()))
            elif not is_output(user):
                return False
    return not backend.quantize_graph_outputs


def left_as_returned(node: fx.Node, backend: Backend) -> Verdict | None:
    """Return the verdict on a transposed convolution that the target computes in float, so that Q/DQ nodes would only cost.

    The target has integer kernels for its form as a convolution, which needs a quantized output, and only outputs of the graph
    take it, at each of its calls. None for other ops.
    """
    if not (backend.sub_pixel and kind_of(node).transposed):
        return None
    calls = node.graph.find_nodes(op="call_module", target=node.target) if node.op == "call_module" else (node,)
    return float_output(backend) if all(is_returned(call, backend) for call in calls) else None


def float_output(backend: Backend) -> Verdict:
    """Return the verdict on an op that is left in float because its output is."""
    why = f"its output is not quantized, and {backend.name} computes it in integers only between two quantized tensors"
    return Verdict.left_float(Cause.NOT_QUANTIZED_AROUND, why)


def _part_of_unit(first: fx.Node, node: fx.Node, backend: Backend) -> str | None:
    kind = kind_of(node)
    if kind.normalizes_batches and kind_of(first).layer:
        return "batch_norm"
    return "activation" if backend.role(kind) == "activation" and backend.joins(kind_of(first), kind) else None
