"""Rules for ops whose kind depends on their arguments: each returns the name of a kind from a node."""

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.kind import Bounds, Read
from qtoolkit.op_kinds.recorded import length_of

OTHER = "other"
SPLITS = ("chunk", "split", "tensor_split", "unbind")
EXTREMES = ("max", "min")  # with a dimension they return values and indices, by these names
VALUES, INDICES = "values", "indices"
# Functions and methods that return booleans or integers for tensors of any dtype.
DISCRETE = frozenset((
    "eq", "ne", "gt", "ge", "lt", "le", "greater", "less", "not_equal", "greater_equal", "less_equal", "isnan", "isinf",
    "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor", "and_", "or_", "xor", "invert", "bool", "int",
    "long", "argmax", "argmin", "argsort",
))  # fmt: skip
IMAGES = (4, 5)  # the dimensions of images and volumes, with batch and channels
CASTS = ("float", "double", "half", "bfloat16", "to", "type_as", "cpu", "cuda")  # methods
UPSAMPLE_KINDS = {
    **dict.fromkeys(("nearest", "nearest-exact"), "upsample_nearest"),
    **dict.fromkeys(("linear", "bilinear", "trilinear"), "upsample_linear"),
    "bicubic": "upsample_cubic",
    "area": "avg_pool",
}


def module_of(node: fx.Node) -> nn.Module:
    """Return the module that a call_module node calls."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, str):
        raise TypeError(f"node {node.name!r} calls no module of a GraphModule.")
    return owner.get_submodule(node.target)


def called_module(node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls; None for a node that calls none."""
    return module_of(node) if node.op == "call_module" else None


def called_by(node: fx.Node) -> object:
    """Return the callee of a node: the type of its module, or its function or method."""
    return type(module_of(node)) if node.op == "call_module" else node.target


def argument(node: fx.Node, position: int, name: str, default: object = None) -> Any:
    """Return an argument of a node; for a node that calls a module, the module's attribute of that name."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        return default if owner is None else getattr(owner.get_submodule(str(node.target)), name, default)
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_constant(value: object) -> bool:
    """Return whether an operand is a number, or a parameter or buffer of the model."""
    if isinstance(value, fx.Node):
        return value.op == "get_attr" or is_number(value)
    return isinstance(value, int | float)


READ_SIZES = ("size", "dim", "ndimension", "numel", "nelement")
READ_NUMBERS = (*READ_SIZES, "element_size", "stride", "item")
SIZES = ("shape", "ndim")
ON_NUMBERS = ("_operator", "builtins", "math", length_of.__module__)


def is_number(node: fx.Node) -> bool:
    """Return whether a node returns numbers and no tensor: by the example inputs, or because its inputs are numbers."""
    known: dict[fx.Node, bool] = {}
    waiting = [node]
    while waiting:  # graphs are deeper than Python's stack
        current = waiting[-1]
        sources = current.all_input_nodes
        seen = facts_of(current).is_number
        if seen is not None or _reads_numbers(current):
            known[current] = seen is not False
        elif not (sources and _computes_plainly(current)) or any(known.get(source) is False for source in sources):
            known[current] = False
        elif all(source in known for source in sources):
            known[current] = True
        else:
            waiting += [source for source in sources if source not in known]
            continue
        waiting.pop()
    return known[node]


def reads_sizes(node: fx.Node) -> bool:
    """Return whether a node reads sizes of a tensor, which the quantizer of the tensor keeps."""
    if node.op == "call_method":
        return node.target in READ_SIZES
    return node.target is length_of or (node.target is getattr and node.args[1] in SIZES)


def _reads_numbers(node: fx.Node) -> bool:
    return reads_sizes(node) or (node.op == "call_method" and node.target in READ_NUMBERS)


def _computes_plainly(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ON_NUMBERS


def _of_two(kind: str, with_constant: str, neutral: int, commutes: bool) -> Callable[[fx.Node], str]:
    """Return the rule of an op on two tensors, whose kind is `with_constant` if one operand is a constant.

    With the `neutral` number, as in the 0 that `sum(tensors)` begins with, the values stay.
    """

    def rule(node: fx.Node) -> str:
        """Return the kind by the operands; "other" for two constants, and with an alpha or a rounding mode."""
        operands = argument(node, 0, "input"), argument(node, 1, "other")
        if any(o is None for o in operands) or all(is_constant(o) for o in operands):
            return OTHER
        if argument(node, 2, "alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            return OTHER
        if any(isinstance(o, int | float) and o == neutral for o in operands[not commutes :]):
            return "identity"
        return with_constant if any(is_constant(o) for o in operands) else kind

    return rule


add = _of_two("add", "shift", neutral=0, commutes=True)
sub = _of_two("sub", "shift", neutral=0, commutes=False)
mul = _of_two("mul", "scale", neutral=1, commutes=True)
_div = _of_two("div", "scale", neutral=1, commutes=False)


def div(node: fx.Node) -> str:
    """Return the kind of a division; "other" for a constant divided by a tensor."""
    return OTHER if is_constant(argument(node, 0, "input")) else _div(node)


def written_out(equation: str) -> str:
    """Return an einsum's equation with its result: by default the dots, then the letters that appear once, sorted."""
    equation = equation.replace(" ", "")
    if "->" in equation:
        return equation
    once = "".join(sorted(letter for letter in equation if letter.isalpha() and equation.count(letter) == 1))
    return f"{equation}->{'...' if '...' in equation else ''}{once}"


def einsum(node: fx.Node) -> str:
    """Return "matmul" for an einsum that is one: two operands that share letters which are not in the result."""
    terms = re.fullmatch(r"([a-zA-Z.]+),([a-zA-Z.]+)->([a-zA-Z.]+)", written_out(str(node.args[0])))
    if terms is None or len(node.args) != 3:
        return "einsum"
    left, right, result = (set(term) for term in terms.groups())
    only_in_one = (left ^ right) - result
    return "matmul" if (left & right) - result and not only_in_one else "einsum"


def mean(node: fx.Node) -> str:
    """Return "avg_pool" for a mean over the spatial dimensions."""
    dims = argument(node, 1, "dim")
    return "avg_pool" if is_over_image(dims, facts_of(node).input_dims) else "mean"


def is_over_image(dims: object, rank: int | None) -> bool:
    """Return whether a reduction is over all positions of an image or of a volume, of four or five dimensions.

    If the number of dimensions is not known (None), dimensions that may be these count as them.
    """
    return any(is_over_positions(dims, image) for image in IMAGES if rank in (None, image))


def is_over_positions(dims: object, rank: int) -> bool:
    """Return whether a reduction is over all dimensions after the channels."""
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return False
    return sorted(dim % rank for dim in dims) == list(range(2, rank))


def upsample(node: fx.Node) -> str:
    """Return the kind of an interpolation by its mode: nearest picks values, others compute new ones."""
    mode = argument(node, 3, "mode", "nearest")
    return UPSAMPLE_KINDS.get(str(mode), OTHER)


def pad(node: fx.Node) -> str:
    """Return "zero_pad" for padding with zero, which is on every grid, "edge_pad" for copies, and "pad" for other values."""
    if argument(node, 2, "mode", "constant") != "constant":
        return "edge_pad"
    return "zero_pad" if argument(node, 3, "value") in (None, 0) else "pad"


def by_bounds(bounds_of: Callable[[Read], Bounds]) -> Callable[[fx.Node], str]:
    """Return the rule of an op that is a bounded ReLU, "relu6", for a lower bound of zero or more; else a "clamp".

    With the values of another tensor as a bound it is no activation of one tensor: "other".
    """

    def rule(node: fx.Node) -> str:
        bounds = bounds_of(partial(argument, node))
        if not bounds.known and not all(map(is_constant, node.all_input_nodes[1:])):
            return OTHER
        return "relu6" if bounds.low >= 0 else "clamp"

    return rule


def attribute(node: fx.Node) -> str:
    """Return "transpose" for x.T and x.mT, "slice" for x.max(1).values; other attributes hold no data."""
    if node.args[1] == VALUES and isinstance(node.args[0], fx.Node) and gives_indices(node.args[0]):
        return "slice"
    return "transpose" if node.args[1] in ("T", "mT") else OTHER


def item(node: fx.Node) -> str:
    """Return "slice" for a slice of a tensor, and for one of the tensors that a split returns."""
    source, index = node.args
    if not isinstance(source, fx.Node):
        return OTHER
    if gives_tuple(source):
        return "slice" if isinstance(index, int | slice) else OTHER
    if facts_of(source).is_sequence:
        return OTHER
    parts = index if isinstance(index, tuple) else (index,)
    return "slice" if any(isinstance(p, slice) or p is Ellipsis for p in parts) and all(map(_picks, parts)) else OTHER


def _of_tensors(kind: str) -> Callable[[fx.Node], str]:
    """Return a rule that knows a concatenation of tensors, but not one of a list that an unknown op returns."""

    def rule(node: fx.Node) -> str:
        tensors = argument(node, 0, "tensors")
        is_list = isinstance(tensors, fx.Node) and facts_of(tensors).is_sequence and not gives_tuple(tensors)
        return OTHER if is_list else kind

    return rule


cat, stack = _of_tensors("cat"), _of_tensors("stack")


def gives_tuple(node: fx.Node) -> bool:
    """Return whether an op is known to return several tensors."""
    while node.target is operator.getitem and isinstance(node.args[1], slice) and isinstance(node.args[0], fx.Node):
        node = node.args[0]  # some of the tensors, if there are several
    if node.op == "call_module":
        return bool(argument(node, 0, "return_indices", False))
    return name_called(node) in SPLITS or gives_indices(node)


def gives_indices(node: fx.Node) -> bool:
    """Return whether a function or a method returns the values that it picks, and their indices."""
    name = name_called(node)
    return name.endswith("_with_indices") or (name in EXTREMES and _dim_of(node) is not None)


def picks_indices(node: fx.Node) -> bool:
    """Return whether a node takes the indices out of the result of such an op."""
    if node.target not in (operator.getitem, getattr) or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[1] in (1, INDICES) and gives_indices(node.args[0])


def _dim_of(node: fx.Node) -> object:
    """Return the dimension of x.max(1); None for x.max(), and of the elementwise x.max(y)."""
    dim = argument(node, 1, "dim")
    return dim if isinstance(dim, int) or (isinstance(dim, fx.Node) and is_number(dim)) else None


def _of_one_tensor(kind: str) -> Callable[[fx.Node], str]:
    """Return the rule of the largest or the smallest values of one tensor; for two tensors it is no reduction."""

    def rule(node: fx.Node) -> str:
        is_of_two = "other" in node.kwargs or (
            len(node.args) > 1 and name_called(node) in EXTREMES and _dim_of(node) is None
        )
        return OTHER if is_of_two else kind

    return rule


maximum, minimum = _of_one_tensor("max"), _of_one_tensor("min")


def name_called(node: fx.Node) -> str:
    """Return the name of the function or the method that a node calls, "" for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _picks(part: object) -> bool:
    return part is None or part is Ellipsis or isinstance(part, int | slice)
