"""Ops in a graph that run as one: chains of a batch norm with its neighbours, and pairs of a function and its quantizer.

A chain begins with the layer before its batch norm. The graph stays as it is; only the forward that is written has a
unit for a chain, or calls `qtoolkit.graph.program.epilogue` if no layer is in it, and has a unit for a pair.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.graph.capture.rewrites.in_place import changes_first
from qtoolkit.graph.module_calls import NUMBER
from qtoolkit.graph.nodes import bounds_of, form_of, is_quantizer, is_weight_quantizer, name_of
from qtoolkit.nn import QuantMultiheadAttention, QuantWeighted
from qtoolkit.nn.batch_norm import LinkedBatchNorm, is_batch_norm
from qtoolkit.nn.fusion import Unit, fusion
from qtoolkit.op_kinds.kind import Bounds
from qtoolkit.op_kinds.rules import is_number, module_of
from qtoolkit.op_kinds.table import calls_where
from qtoolkit.running import Run
from qtoolkit.verdicts import Cause, Refusal

ADDS = calls_where(lambda kind: kind.adds)
CALLED_APART = Refusal(Cause.CALL, "it is called in another block, or an op between them may change its input")
SIZES = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")  # arguments of a max pool


@dataclass
class Chain:
    """Nodes that run as one op, each but the last with one user."""

    batch_norm: fx.Node
    layer: fx.Node | None = None  # the QAT layer before it that is linked to it
    add: fx.Node | None = None  # an add of its output and another tensor
    residual: fx.Node | None = None  # that tensor
    activation: fx.Node | None = None  # a piecewise linear activation
    bounds: Bounds | None = None  # what it computes, if it is a function
    quantizer: fx.Node | None = None
    end: str = ""  # why nothing more is in it

    @property
    def following(self) -> list[fx.Node]:
        """The nodes after the batch norm."""
        return [node for node in (self.add, self.activation, self.quantizer) if node is not None]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes, in order."""
        return [*([] if self.layer is None else [self.layer]), self.batch_norm, *self.following]

    @property
    def last(self) -> fx.Node:
        """The node whose value the op computes."""
        return self.nodes[-1]

    @property
    def first(self) -> fx.Node:
        """The node that a report describes."""
        return self.batch_norm

    def sentence(self) -> str:
        """Return how the batch norm is computed in training mode, as the modules are now."""
        bn, layer = module_of(self.batch_norm), None
        if isinstance(bn, LinkedBatchNorm):
            layer = CALLED_APART if self.layer is None else module_of(self.layer)
        quantizer = None if self.quantizer is None else module_of(self.quantizer)
        found = fusion(Run.EAGER, layer, bn, True, self._activation(), quantizer, in_training=True)
        if isinstance(found, Refusal):
            return f"computed by torch: {found.text}"
        joined, end = self._joined(found), self.end if found.end is None else found.end.text
        if not isinstance(bn, LinkedBatchNorm) and found.quantizer is None:
            return f"computed by torch: no quantizer is fused with it ({end})"
        names = ", ".join("its quantizer" if node is self.quantizer else name_of(node) for node in joined)
        said = [f"fused with {names}" if joined else "not fused", end]
        said.append("" if found.layer is None else f"its layer is not fused: {found.layer.text}")
        return "; ".join(filter(None, said))

    def _activation(self) -> nn.Module | Bounds | None:
        """Return the module of the activation, or its function."""
        return self.bounds if self.activation is None or self.bounds is not None else module_of(self.activation)

    def _joined(self, found: Unit) -> list[fx.Node]:
        """Return the nodes after the batch norm that its op computes."""
        apart = [self.activation] if found.bounds is None else []
        apart += [self.quantizer] if found.quantizer is None else []
        return [node for node in self.following if node not in apart]


@dataclass(frozen=True)
class FunctionPair:
    """Nodes that run as one op."""

    function: fx.Node  # an activation or a layer norm, whose only user is the other
    quantizer: fx.Node

    @property
    def first(self) -> fx.Node:
        """The node that a report describes."""
        return self.function

    def sentence(self) -> str:
        """Return how the function is computed in training mode, as the modules are now."""
        module = module_of(self.function) if self.function.op == "call_module" else None
        found = fusion(Run.EAGER, activation=module, quantizer=module_of(self.quantizer))
        return f"computed by torch: {found.text}" if isinstance(found, Refusal) else "fused with its quantizer"


class ChainFinder:
    """Finds the chains among the nodes that one function runs, in order; `results` are its results."""

    def __init__(self, nodes: Sequence[fx.Node], results: Collection[fx.Node]) -> None:
        self.order = {node: place for place, node in enumerate(nodes)}
        self.results = results
        self.taken = set[fx.Node]()

    def run(self) -> list[Chain]:
        """Return the chain of each call of a batch norm."""
        return [self._chain(node) for node in self.order if is_batch_norm_call(node)]

    def _chain(self, node: fx.Node) -> Chain:
        chain = Chain(node, self._layer(node))
        node_after = self._after(chain)
        if node_after is not None and self._adds(chain, node_after):
            node_after = self._after(chain)
        if node_after is not None and self._activates(chain, node_after):
            node_after = self._after(chain)
        if node_after is not None and is_activation_quantizer(node_after):
            chain.quantizer, chain.end = node_after, ""
        elif node_after is not None:
            chain.end = f"{node_after.name!r} follows, which cannot be fused"
        self.taken.update(chain.nodes)
        return chain

    def _layer(self, node: fx.Node) -> fx.Node | None:
        source = node.all_input_nodes[0]
        alone = source in self.order and len(source.users) == 1 and source not in self.results
        if not alone or source.op != "call_module" or not source.args:
            return None
        layer = module_of(source)
        return source if isinstance(layer, QuantWeighted) and layer.batch_norm is module_of(node) else None

    def _after(self, chain: Chain) -> fx.Node | None:
        """Return the only user of a chain's last node, if the same function runs it right after."""
        last = chain.last
        if len(last.users) != 1 or last in self.results:
            users = len(last.users)
            chain.end = f"{users} ops take {last.name!r}" if users != 1 else f"a block returns {last.name!r}"
            return None
        (user,) = last.users
        if user.op == "output":
            chain.end = "the model returns it"
        elif user not in self.order:
            chain.end = f"{user.name!r} is in another block"
        elif user in self.taken:
            chain.end = f"{user.name!r} is fused with another batch norm"
        elif chain.add is not None and not self._runs_next(last, user):
            chain.end = f"{user.name!r} does not run right after it"  # an op between might change the other tensor
        else:
            return user
        return None

    def _runs_next(self, node: fx.Node, user: fx.Node) -> bool:
        between = list(self.order)[self.order[node] + 1 : self.order[user]]
        return all(is_activation_quantizer(other) for other in between)

    def _adds(self, chain: Chain, node: fx.Node) -> bool:
        others = [operand for operand in addends(node) if operand is not chain.last]
        if len(others) != 1 or (changes_first(node) and node.args[0] is not chain.last):
            return False  # it changes the other tensor, which somebody may read
        chain.add, chain.residual = node, others[0]
        return True

    def _activates(self, chain: Chain, node: fx.Node) -> bool:
        form, bounds = form_of(node), bounds_of(node)
        if form is None or bounds is None or form.passes_at_bounds:
            return False
        if node.op == "call_module":  # the module's own bounds, as they are at each call
            chain.activation = node
        elif bounds.known and len(node.all_input_nodes) == 1:
            chain.activation, chain.bounds = node, bounds
        return chain.activation is not None


def addends(node: fx.Node) -> list[fx.Node]:
    """Return the two tensors that a node adds; nothing for other nodes."""
    adds = node.op != "call_module" and node.target in ADDS and len(node.args) == 2
    if not adds or set(node.kwargs) - {"alpha"} or node.kwargs.get("alpha", 1) != 1:
        return []
    found = [each for each in node.args if isinstance(each, fx.Node) and not is_number(each)]
    return found if len(found) == 2 else []


def _called_alone(node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls with its input alone, or with the number of the call; None for other nodes."""
    one_input = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and set(node.kwargs) <= {NUMBER}
    return module_of(node) if node.op == "call_module" and one_input else None


def is_batch_norm_call(node: fx.Node) -> bool:
    """Return whether a node calls a batch norm that is a module, with its input alone."""
    module = _called_alone(node)
    return module is not None and is_batch_norm(module)


def is_max_pool_call(node: fx.Node) -> bool:
    """Return whether a node calls an nn.MaxPool2d with its input alone, or its function without indices."""
    if node.op == "call_module":
        return type(_called_alone(node)) is nn.MaxPool2d
    if node.op != "call_function" or node.target not in (F.max_pool2d, torch.max_pool2d):
        return False
    gives_indices = node.kwargs.get("return_indices", False) is not False
    return len(node.args) <= len(SIZES) and set(node.kwargs) <= {*SIZES, "return_indices"} and not gives_indices


def is_attention_call(node: fx.Node) -> bool:
    """Return whether a node calls a QuantMultiheadAttention."""
    return node.op == "call_module" and isinstance(module_of(node), QuantMultiheadAttention)


def is_weighted_call(node: fx.Node) -> bool:
    """Return whether a node calls a QAT layer with its input alone."""
    return isinstance(_called_alone(node), QuantWeighted)


def is_activation_quantizer(node: fx.Node) -> bool:
    """Return whether a node calls a quantizer of an activation that a pass inserted."""
    return is_quantizer(node) and not is_weight_quantizer(node)
