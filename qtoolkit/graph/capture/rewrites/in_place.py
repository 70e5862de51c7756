"""In-place ops: later readers of the changed tensor read the op's result, so that edges of the graph show the data flow.

A quantizer on an edge makes a new tensor: after it, a reader of x in `x.add_(y)` would read the tensor without the sum.
"""

import inspect
import operator
from collections.abc import Iterator

from torch import fx, nn

from qtoolkit.graph.capture.functions import is_foreign
from qtoolkit.graph.nodes import parameters_in
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.recorded import set_item
from qtoolkit.op_kinds.rules import is_number

# Functions and methods whose result always shares the memory of their first argument. The names are torch's: a kind of op says
# where values go, and has views and copies (expand and repeat) among its ops.
VIEWS = (
    "chunk", "detach", "expand", "getitem", "narrow", "permute", "select", "split", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view", "view_as",
)  # fmt: skip
OPERATORS = tuple(
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)
)


def run(graph: fx.Graph, model: nn.Module) -> None:
    """Make later readers of a tensor that an op changes in place read the op's result. A second run changes nothing.

    Raises:
        ValueError: A tensor is changed through a view, or a view is read after its base was changed.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    constant = parameters_in(graph)  # such as a bias that is written piece by piece; it is never quantized
    for node in list(graph.nodes):
        changed = changed_by(node, model)
        if changed is None:
            continue
        if changed not in constant:
            _check_views(node, changed, order)
        for reader in list(changed.users):
            if order[reader] > order[node]:
                reader.replace_input_with(changed, node)


def changed_by(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the tensor that an op changes in place, or that it writes its result to, and returns; or None."""
    of_torch = node.op == "call_function" and not is_foreign(node.target)
    if of_torch and isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node) or not _works_in_place(node, model):
        return None
    return None if is_number(first) else first  # += on a number makes a new number


def base_of(node: fx.Node, model: nn.Module) -> fx.Node:
    """Return the tensor whose memory a view, or the result of in-place ops, shares; a tensor of its own is its base."""
    changed = changed_by(node, model)
    if changed is not None or _is_view(node):
        return base_of(node.all_input_nodes[0] if changed is None else changed, model)
    return node


def _works_in_place(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    if node.op not in ("call_method", "call_function"):
        return False
    return changes_first(node) or facts_of(node).assigns_in_place or _inplace_argument(node)


def changes_first(node: fx.Node) -> bool:
    """Return whether a node calls a function or a method that changes its first argument, by its name."""
    is_method = node.op == "call_method"
    name = str(node.target) if is_method else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.startswith("_"):
        return name != "requires_grad_"
    called = getattr(operator, name, None) if is_method else node.target  # operator.__iadd__ is operator.iadd
    return called in OPERATORS


def _inplace_argument(node: fx.Node) -> bool:
    if node.op != "call_function" or "inplace" in node.kwargs:
        return node.kwargs.get("inplace") is True
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]  # a function
    except (TypeError, ValueError):  # torch's built-in functions have no signature and no such argument
        return False
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return place < len(node.args) and node.args[place] is True


def _check_views(node: fx.Node, changed: fx.Node, order: dict[fx.Node, int]) -> None:
    for view, base in (*((v, changed) for v in changed.users), *((changed, b) for b in _bases(changed))):
        read = view if base is changed else base
        readers = [reader for reader in read.users if order[reader] > order[node]]
        later = [reader for reader in readers if not _writes_back(reader, view, base, node)]
        if _is_view(view) and view is not node and order[view] < order[node] and later:
            raise ValueError(
                f"prepare: {node.name!r} changes {changed.name!r} in place, and {later[0].name!r} then reads {read.name!r}, "
                f"which shares its memory; a quantizer between them would lose the change. Use the out-of-place op instead."
            )


def _writes_back(reader: fx.Node, view: fx.Node, base: fx.Node, result: fx.Node) -> bool:
    """Return whether a reader writes the result back to where the view came from: `x[1:] += y` reads, adds and writes."""
    return reader.target is set_item and reader.args == (base, view.args[-1], result)


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """Return the tensors whose memory a view shares."""
    while _is_view(node):
        node = node.all_input_nodes[0]
        yield node


def _is_view(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and name in VIEWS and bool(node.all_input_nodes)
