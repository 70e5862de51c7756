"""Where a tensor of a graph comes from: the op that computes it, and the quantizer that gives its values."""

from collections.abc import Sequence

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.graph.block_calls import BlockCall, ancestors
from qtoolkit.graph.blocks import find_module
from qtoolkit.graph.nodes import is_quantizer, kind_of, tensor_inputs, users_of
from qtoolkit.nn.layer_call import DROPOUTS
from qtoolkit.op_kinds.facts import facts_of
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.rules import module_of


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the first tensor that an op takes; None where it takes none that could be quantized."""
    inputs = tensor_inputs(node)
    return inputs[0] if inputs else None


def computed_by(node: fx.Node, quantizers: bool = True, sole_user: bool = False) -> fx.Node | None:
    """Return the op that computes a tensor, back through ops that return their input in eval mode, and through `quantizers`.

    With `sole_user` None where a tensor on the way has other users.
    """
    while not sole_user or len(users_of(node)) == 1:
        if not ((quantizers and is_quantizer(node)) or kind_of(node).returns_input):
            return node
        node = tensor_inputs(node)[0]
    return None


class QuantizersBehind:
    """The quantizer nodes that tensors come from, through ops that only move values; None for a tensor that is float.

    For a concat whose inputs share a scale, it is the first input's. `in_training` asks that values are on the quantizer's grid
    in training mode too: after a dropout they are not, unless its probability is 0 (see `dropouts_behind`).

    It walks each part of a graph once, for all tensors that it is asked for. So it is for a loop that does not change the ops.
    """

    def __init__(self, backend: Backend, in_training: bool = False) -> None:
        self.backend, self.in_training = backend, in_training
        self._found: dict[fx.Node, fx.Node | None] = {}

    def __getitem__(self, node: fx.Node) -> fx.Node | None:
        found, waiting = self._found, [node]
        while waiting:  # graphs are deeper than Python's stack
            current = waiting[-1]
            sources = [] if self.in_training and _may_drop(current) else _moved(current, self.backend)
            if unknown := [source for source in sources if source not in found]:
                waiting += unknown
                continue
            found[current] = current if is_quantizer(current) else _of_one_grid([found[source] for source in sources])
            waiting.pop()
        return found[node]


def quantizer_behind(node: fx.Node, backend: Backend, in_training: bool = False) -> fx.Node | None:
    """Return the quantizer node that one tensor comes from (see `QuantizersBehind`)."""
    return QuantizersBehind(backend, in_training)[node]


def _moved(node: fx.Node, backend: Backend) -> list[fx.Node]:
    """Return the tensors whose values an op only moves; none for a quantizer, and for an op that computes others."""
    role = "" if is_quantizer(node) else backend.role(kind_of(node))
    return tensor_inputs(node)[: {"transparent": 1, "concat": None}.get(role, 0)]


def _of_one_grid(quantizers: list[fx.Node | None]) -> fx.Node | None:
    """Return the first of some quantizers where all of them are one; None where one is missing."""
    targets = {None if quantizer is None else quantizer.target for quantizer in quantizers}
    return quantizers[0] if len(targets) == 1 else None


def _may_drop(node: fx.Node) -> bool:
    """Return whether an op that does nothing in eval mode may change values in training."""
    if not kind_of(node).returns_input or node.op == "call_method":
        return False
    return node.op != "call_module" or not (isinstance(module_of(node), nn.Identity) or _drops_nothing(module_of(node)))


def _drops_nothing(module: nn.Module) -> bool:
    return type(module) in DROPOUTS and not module.p


def modules_behind(tensors: Sequence[fx.Node], backend: Backend) -> tuple[nn.Module, ...]:
    """Return the modules between the takers of some tensors and the quantizers that `quantizer_behind` finds.

    They are those that the graph calls, and the blocks that values enter or leave on the way.
    """
    moving = list(reached(tensors, lambda node: _moved(node, backend)))
    called = [module_of(node) for node in moving if node.op == "call_module" and not is_quantizer(node)]
    makers = [maker for node in moving if is_quantizer(node) for maker in node.all_input_nodes]
    blocks = blocks_between([*makers, *moving, *(user for tensor in tensors for user in tensor.users)])
    return tuple(module for module in dict.fromkeys((*called, *blocks)) if module is not None)


def blocks_between(nodes: Sequence[fx.Node]) -> list[nn.Module | None]:
    """Return the blocks around some nodes, without those that are around all of them; none before blocks have their calls."""
    gm = nodes[0].graph.owning_module if nodes else None
    calls: tuple[BlockCall, ...] = getattr(gm, "calls", ())
    made = {facts_of(node).call for node in nodes}
    paths = [set(ancestors(calls, call)) for call in made if call is not None] if calls else []
    if gm is None or not paths:
        return []
    return [
        find_module(gm, calls[call].block) for call in sorted(paths[0].union(*paths) - paths[0].intersection(*paths))
    ]
