"""The kind of op of a graph node, a module or a QAT type."""

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.integer.kernels import OpKernel
from qtoolkit.nn import LinkedBatchNorm, QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.function_bias import FunctionBias
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.kind import WEIGHTED, Bounds, Form, OpKind
from qtoolkit.op_kinds.recorded import by_mode, is_mode
from qtoolkit.op_kinds.rules import (
    DISCRETE,
    argument,
    called_module,
    gives_tuple,
    is_number,
    module_of,
    name_called,
    picks_indices,
)
from qtoolkit.op_kinds.table import (
    FOREIGN,
    IDENTITY,
    KINDS,
    NO_OPS,
    OF_FUNCTION,
    OF_METHOD,
    OF_MODULE,
    OTHER,
    Entry,
    kind_named,
    kind_of_type,
)
from qtoolkit.quantizers.frozen import ShapedActivation
from qtoolkit.quantizers.quantizer import Quantizer


def kind_of(node: fx.Node) -> OpKind:
    """Return the kind of a node: one of the table's, OTHER, or one of NO_OPS for inputs, outputs and constants."""
    if node.op in NO_OPS:
        return NO_OPS[node.op]
    entry = _entry_of(node)
    if entry is None or is_number(node):
        return OTHER
    kind, form = entry
    if form.refine is not None:
        kind = kind_named(form.refine(node))
    return KINDS["slice"] if kind is OTHER and _picks_one(node) else kind


def _picks_one(node: fx.Node) -> bool:
    """Return whether a node takes x[0] of a single tensor, or an output tensor of a tuple."""
    source = _indexed(node)
    if source is None:
        return False
    return node.args[1] in _items(source) or (not gives_tuple(source) and kind_of(source).one_tensor)


def _indexed(node: fx.Node) -> fx.Node | None:
    """Return x of x[0]; None for other nodes."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _items(node: fx.Node) -> tuple[int, ...]:
    form = form_of(node)
    return () if form is None else form.items


def returns_tuple(node: fx.Node) -> bool:
    """Return whether an op is known to return several tensors."""
    return gives_tuple(node) or bool(_items(node))


def bounds_of(node: fx.Node) -> Bounds | None:
    """Return what a piecewise linear activation computes, NaN where the model computes it; None for other ops."""
    form = form_of(node)
    return None if form is None or form.bounds is None else form.bounds(partial(argument, node))


def callable_of(node: fx.Node) -> Callable[..., Any]:
    """Return the module, the function or the method of tensors that a node calls."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target))  # type: ignore[no-any-return]  # a method
    return module_of(node) if node.op == "call_module" else node.target  # type: ignore[return-value]  # a function


def form_of(node: fx.Node) -> Form | None:
    """Return how the table describes an op; None for an op that it does not know, and of nodes that are no ops."""
    entry = None if node.op in NO_OPS else _entry_of(node)
    return None if entry is None else entry[1]


def outputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of an op's output tensors: the op, or the nodes that take them from the tuple that it returns.

    If the table does not know whether an op returns a tensor or a tuple, and an item is taken, there are none.
    """
    items, taken = _items(node), [user for user in node.users if _indexed(user) is node]
    if items:
        return [user for user in taken if user.args[1] in items]
    return [] if taken and kind_of(node) is OTHER else [node]


def owner_of(node: fx.Node) -> fx.Node:
    """Return the op whose output tensor a node takes from a tuple; any other node is returned as it is."""
    source = _indexed(node)
    return node if source is None or node.args[1] not in _items(source) else source


def _entry_of(node: fx.Node) -> Entry | None:
    if node.op == "call_module":
        return IDENTITY if facts_of(node).returns_input else _entry_of_module(module_of(node))
    if node.op == "call_method":
        return OF_METHOD.get(str(node.target))
    if not callable(node.target):
        return None
    name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
    return OF_FUNCTION.get(node.target) or FOREIGN.get(name)


def kind_of_module(module: nn.Module) -> OpKind:
    """Return the kind of a module, whether a graph calls it or not."""
    entry = _entry_of_module(module)
    return OTHER if entry is None else entry[0]


def _entry_of_module(module: nn.Module) -> Entry | None:
    # By exact type: a subclass of a float layer may compute anything. A QAT module declares its kind.
    if isinstance(module, QuantModule):
        kind = kind_of_type(type(module))
        form = next((form for form in kind.forms if module.FLOAT in form.modules), Form())
        return kind, Form(operands=form.operands, items=form.items)
    if is_batch_norm(module):
        return KINDS["batch_norm"], KINDS["batch_norm"].forms[0]
    if isinstance(module, OpKernel):  # it takes the arguments of a function
        kind = kind_named(module.kind)
        return kind, Form(operands=next(form.operands for form in kind.forms if form.functions))
    return OF_MODULE.get(type(module)) or FOREIGN.get((type(module).__module__, type(module).__name__))


def float_type(module: nn.Module) -> type[nn.Module]:
    """Return the type of a module, or the float type of a QAT module."""
    if isinstance(module, LinkedBatchNorm):
        return module.float_type
    return module.FLOAT if isinstance(module, QuantModule) else type(module)


def object_type_of(node: fx.Node) -> Any:
    """Return what QConfigMapping.set_object_type names for a node: its (float) module type, function or tensor method."""
    if node.op == "call_module":
        module = module_of(node)
        return module.object_type if isinstance(module, OpKernel) else float_type(module)
    return getattr(torch.Tensor, str(node.target), node.target) if node.op == "call_method" else node.target


def name_of(node: fx.Node) -> str:
    """Return the name of a node in a QConfigMapping: the dotted name of its module, or its own name."""
    module = called_module(node)
    if isinstance(module, OpKernel):
        return module.replaces
    return str(node.target) if node.op == "call_module" else node.name


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that an op takes as data, each once, in order: weights of functions too, numbers not.

    For an op that the table does not know, these are all its inputs.
    """
    entry = _entry_of(node)
    known = entry is not None and entry[0] is not OTHER and not is_number(node)
    sources = dict.fromkeys(_nodes_in(_data(node, entry[1]))) if entry is not None and known else node.all_input_nodes
    return [source for source in sources if not (is_mode(source) or is_number(source))]


def operands_of(node: fx.Node) -> list[object]:
    """Return the arguments of an op in the table that are data, in order; one tensor may be several of them."""
    form = form_of(node)
    return [] if form is None else list(_data(node, form))


def is_discrete(node: fx.Node) -> bool:
    """Return whether a node returns tensors of integers or booleans: by the example inputs, or by its function."""
    while not (facts_of(node).is_discrete or name_called(node) in DISCRETE or picks_indices(node)):
        sources = tensor_inputs(node) if kind_of(node).moves else []
        if not sources:
            return False
        node = sources[0]
    return True


def is_output(node: fx.Node) -> bool:
    """Return whether a node is the output of a graph, or selects a result of the graph by the mode."""
    return node.op == "output" or (chooses_by_mode(node) and all(user.op == "output" for user in node.users))


def chooses_by_mode(node: fx.Node) -> bool:
    """Return whether a node returns one of two tensors: the first in training mode, the second in eval mode."""
    return node.target is by_mode and not is_number(node)


def users_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take a node's result, except nodes that read its sizes.

    Only nodes that take it in eval mode too; all of them for a node that training mode alone takes to return it.
    """
    alone = facts_of(node).training_alone
    readers = [(user, facts_of(user)) for user in readers_of(node)]
    return [user for user, facts in readers if not facts.in_training and (alone or not facts.training_alone)]


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take a node's result, except nodes that read its sizes."""
    return [user for user in node.users if not is_number(user)]


def parameters_in(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are parameters or buffers, or computed from nothing else."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        computed = node.op in ("call_function", "call_method") and node.all_input_nodes
        if node.op == "get_attr" or (computed and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _data(node: fx.Node, form: Form) -> Iterable[object]:
    # A module owns its weight. A further argument, such as output_size, is no data.
    operands = form.operands[:1] if form.operands == WEIGHTED and owns_weight(node) else form.operands
    for position, names in enumerate(operands):
        keywords = [node.kwargs[name] for name in names if name in node.kwargs]
        if names and len(node.args) > position:
            yield node.args[position]
        yield from keywords
    if form.rest:
        yield from node.args[len(form.operands) :]


def _nodes_in(values: Iterable[object]) -> Iterable[fx.Node]:
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _nodes_in(value.values() if isinstance(value, dict) else value)


class QuantizerHolder(nn.Module):
    """The submodule of a prepared model that holds quantizers of its graph. A module that replaces one takes its role.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")
        >>> prepared.activation_quantizers.input_1 = qt.TensorQuantizer(qt.QuantSpec(bits=4))
        >>> prepared.activation_quantizers.input_1.inserted
        True
    """

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get("_modules", {}).get(name)
        if isinstance(before, Quantizer) and isinstance(value, Quantizer):
            value.inserted, value.of_weight = before.inserted, before.of_weight
        super().__setattr__(name, value)


def is_quantizer(node: fx.Node) -> bool:
    """Return whether a node is a quantizer that a pass inserted."""
    module = called_module(node)
    return isinstance(module, FunctionBias) or (isinstance(module, Quantizer | ShapedActivation) and module.inserted)


def is_weight_quantizer(node: fx.Node) -> bool:
    """Return whether a node is a quantizer that a pass inserted for the weight of a function, or for its bias."""
    module = called_module(node)
    return isinstance(module, FunctionBias) or (isinstance(module, Quantizer) and module.inserted and module.of_weight)


def owns_weight(node: fx.Node) -> bool:
    """Return whether a node calls a module of a kind whose modules own weights; a kernel of a function does not."""
    return node.op == "call_module" and kind_of(node).has_weight and not isinstance(module_of(node), OpKernel)


def has_float_weight(node: fx.Node) -> bool:
    """Return whether a node is a layer or an attention module whose weights stay float."""
    if not (kind_of(node).multiplies and owns_weight(node)):
        return False
    layer = module_of(node)
    return not isinstance(layer, QuantModule) or not layer.weight_quantizers()


def quantizes_its_input(node: fx.Node) -> bool:
    """Return whether a node is a layer with a quantizer of its input, such as one that is also called inside a leaf module."""
    return getattr(called_module(node), "input_quantizer", None) is not None


def may_be_packed(node: fx.Node) -> bool:
    """Return whether an input or output of a recurrent layer may be a packed sequence, which is no tensor."""
    while kind_of(owner_of(node)).keeps_state:
        node = tensor_inputs(owner_of(node))[0]
    is_seen = facts_of(node).is_number is not None
    return facts_of(node).is_sequence if is_seen else kind_of(node) is OTHER


def node_name(target: str) -> str | None:
    """Return the name that the node of a submodule or a tensor must have; None leaves the choice to torch.fx.

    torch.fx names a node after its target. A node called "self" would replace the model in the Python of the graph.
    """
    return "self_1" if target == "self" else None
