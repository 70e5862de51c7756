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

# Functions, methods and attributes whose result always shares the memory of their first argument. The names are torch's: a kind
# of op says where values go, and has views and copies (expand and repeat) among its ops.
VIEWS = (
    "H", "T", "adjoint", "as_strided", "chunk", "detach", "diagonal", "dsplit", "expand", "expand_as", "getitem", "hsplit",
    "imag", "mH", "mT", "moveaxis", "movedim", "narrow", "permute", "real", "select", "split", "split_with_sizes", "squeeze",
    "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    "view_as_complex", "view_as_real", "vsplit",
)  # fmt: skip
METHODS_THAT_VIEW = (*VIEWS, "unfold")  # torch.nn.functional.unfold copies
RESHAPES = ("flatten", "ravel", "reshape")  # they share the memory of a tensor that has its elements in their order
MODULES = {nn.Flatten: "flatten", nn.Unflatten: "unflatten"}
OPERATORS = tuple(getattr(operator, f"i{name}") for name in dir(operator) if f"i{name}" in dir(operator))


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
            _check_views(node, changed, order, model)
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
    if changed is not None or _is_view(node, model):
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


def _check_views(node: fx.Node, changed: fx.Node, order: dict[fx.Node, int], model: nn.Module) -> None:
    """Raise ValueError if a tensor that shares the memory of the changed one is read after the change."""
    before = [view for view in _views(changed, model) if order[view] < order[node]]
    for other in (*before, *_bases(changed, model)):
        readers = (reader for reader in other.users if order[reader] > order[node] and not is_number(reader))
        for reader in readers:
            if not _writes_back(reader, changed, other, node):
                raise ValueError(
                    f"prepare: {node.name!r} changes {changed.name!r} in place, and {reader.name!r} then reads "
                    f"{other.name!r}, which shares its memory; a quantizer between them would lose the change. Use the "
                    f"out-of-place op instead."
                )


def _writes_back(reader: fx.Node, view: fx.Node, base: fx.Node, result: fx.Node) -> bool:
    """Return whether a reader writes the result back to where the view came from: `x[1:] += y` reads, adds and writes."""
    return reader.target is set_item and reader.args == (base, *view.args[-1:], result)


def _views(node: fx.Node, model: nn.Module) -> Iterator[fx.Node]:
    """Return the views of a tensor, and the views of these."""
    for user in node.users:
        if _is_view(user, model) and user.all_input_nodes[0] is node:
            yield user
            yield from _views(user, model)


def _bases(node: fx.Node, model: nn.Module) -> Iterator[fx.Node]:
    """Return the tensors whose memory a view shares."""
    while _is_view(node, model):
        node = node.all_input_nodes[0]
        yield node


def _is_view(node: fx.Node, model: nn.Module) -> bool:
    """Return whether a node shares the memory of its first input; a reshaped view is taken for a copy."""
    if not node.all_input_nodes:
        return False
    name = _name(node, model)
    views = METHODS_THAT_VIEW if node.op == "call_method" else VIEWS
    return name in views or (name in RESHAPES and not _is_view(node.all_input_nodes[0], model))


def _name(node: fx.Node, model: nn.Module) -> object:
    """Return the name of the function, method or attribute that a node calls or reads, or that its module calls."""
    if node.op == "call_module":
        return MODULES.get(type(model.get_submodule(str(node.target))))
    if node.op == "call_method":
        return node.target
    return node.args[1] if node.target is getattr else getattr(node.target, "__name__", "")
